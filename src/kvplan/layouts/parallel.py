"""Who holds what: ranks, heads, layers and tokens under TP, PP and DCP. No bytes.

Facts (read from vLLM 0.32; where vLLM has no answer the rule below extends its own):

1. Ranks are counted pipeline stage first, then TP: ``rank = pp * tp_size + tp``. Decode context parallel (DCP) adds
   no process: it splits the TP ranks, ``dcp = tp_rank % dcp_size``, and must divide TP (``config/parallel.py``).
2. A rank of ``parts`` holds ``[floor(r * n / parts), ceil((r + 1) * n / parts))`` of ``n`` heads. Where one divides
   the other this is vLLM's rule: equal shares, or one head repeated on ``parts / n`` neighbours. Where neither divides,
   neighbours share the head on their border, so that every rank holds all that its query heads need.
3. The ranks of one DCP group hold the same KV heads, and each its own tokens: heads are split over ``tp / dcp``.
   vLLM asks for ``tp / num_kv_heads >= dcp`` and so has the same heads on the same ranks.
4. Token ``t`` lies on DCP rank ``(t // interleave) % dcp`` (``v1/worker/block_table.py``); a block id stands for
   ``block_size * dcp`` tokens, of which each rank stores ``block_size``.
5. Layers are cut into stages evenly; a remainder goes one layer each to the stages before the last, from the end
   (``distributed/utils.py``, ``get_pp_indices``), unless ``pp_layers`` says how many each has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.errors import DescriptionError

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_RANKS = 4096
"""More ranks than any engine has; a larger number is a slip of the pen."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands in its engine, and how large the engine is."""

    tp_rank: int
    pp_rank: int
    tp: int
    dcp: int = 1

    @property
    def dcp_rank(self) -> int:
        """Which share of the tokens this rank holds."""
        return self.tp_rank % self.dcp

    @property
    def head_rank(self) -> int:
        """Which share of the KV heads this rank holds, of ``head_parts``."""
        return self.tp_rank // self.dcp

    @property
    def head_parts(self) -> int:
        """Into how many shares KV heads are split."""
        return self.tp // self.dcp


@dataclass(frozen=True, slots=True)
class Parallel:
    """How an engine is spread over ranks."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    dcp_interleave: int = 1
    """Consecutive tokens on one DCP rank."""
    pp_layers: tuple[int, ...] = ()
    """Decoder layers per stage; empty means even."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dcp", "dcp_interleave"):
            if getattr(self, name) < 1:
                raise DescriptionError(f"{name} is {getattr(self, name)}; it is at least 1", field=f"parallel.{name}")
        if self.tp * self.pp > MAX_RANKS:
            raise DescriptionError(
                f"tp {self.tp} times pp {self.pp} are more than {MAX_RANKS} ranks", field="parallel.tp"
            )
        if self.tp % self.dcp:
            raise DescriptionError(
                f"dcp is {self.dcp}, tp is {self.tp}; dcp splits the TP ranks and must divide tp", field="parallel.dcp"
            )
        if self.pp_layers and len(self.pp_layers) != self.pp:
            raise DescriptionError(
                f"pp_layers has {len(self.pp_layers)} entries, pp is {self.pp}; it names the layers of each stage",
                field="parallel.pp_layers",
            )

    def places(self) -> Iterator[Place]:
        """Yield every rank's place, in rank order."""
        for pp_rank in range(self.pp):
            for tp_rank in range(self.tp):
                yield Place(tp_rank, pp_rank, self.tp, self.dcp)

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """Return the decoder layers of each stage.

        >>> [len(stage) for stage in Parallel(pp=4).stages(61)]
        [15, 15, 16, 15]
        """
        counts = self.pp_layers or even_stages(num_layers, self.pp)
        if sum(counts) != num_layers:
            raise DescriptionError(
                f"pp_layers {list(counts)} add up to {sum(counts)}, the model has {num_layers} layers",
                field="parallel.pp_layers",
            )
        starts = [sum(counts[:stage]) for stage in range(self.pp)]
        return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def even_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage as vLLM spreads them (fact 5).

    >>> even_stages(10, 4)
    (2, 3, 3, 2)
    """
    counts = [num_layers // num_stages] * num_stages
    for back in range(2, num_layers % num_stages + 2):
        counts[-back] += 1
    return tuple(counts)


def held(rank: int, parts: int, count: int) -> tuple[int, int]:
    """Return the half-open interval of ``count`` heads that one of ``parts`` ranks holds (fact 2).

    >>> [held(rank, 4, 2) for rank in range(4)], [held(rank, 3, 8) for rank in range(3)]
    ([(0, 1), (0, 1), (1, 2), (1, 2)], [(0, 3), (2, 6), (5, 8)])
    """
    return rank * count // parts, -((rank + 1) * count // -parts)
