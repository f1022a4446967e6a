"""The transfer plan of one local rank and one remote engine, by the names of the field. The planner makes it.

``generate_engine_transfer_plan`` is called once at the handshake; ``EngineTransferPlan.read_specs`` and ``bind`` are
the hot path: array arithmetic on block tables, without a branch on what the layers are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.planner import BlockTable, Descriptors, Election, EngineLayout, PairPlan, bind, elect, plan_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class ReadSpec:
    """One read of one request from one source rank."""

    remote_rank: int
    local_block_ids: tuple[tuple[int, ...], ...]
    """Logical block ids per local group; empty for groups that this read does not touch."""
    remote_block_ids: tuple[tuple[int, ...], ...]
    """Logical block ids per remote group; empty for groups that this read does not touch."""
    descriptors: Descriptors


@dataclass(frozen=True, slots=True, eq=False)
class EngineTransferPlan:
    """What one local rank reads from each rank of one remote engine."""

    local_rank: int
    """Index into the local engine's ranks."""
    pairs: Mapping[int, PairPlan]
    """Per source rank that this rank reads from."""
    election: Election

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """Remote ranks that this rank reads from, ascending."""
        return tuple(sorted(self.pairs))

    def read_specs(
        self, remote: Sequence[BlockTable], local: Sequence[BlockTable], *, num_tokens: int, whole_blocks: bool = True
    ) -> tuple[ReadSpec, ...]:
        """Return the reads of one request, one per source rank, tables given per group of each side."""
        specs = []
        for rank, pair in sorted(self.pairs.items()):
            runs = bind(pair, remote, local, num_tokens=num_tokens, whole_blocks=whole_blocks)
            here = {part.destination_group for part in pair.parts}
            there = {part.source_group for part in pair.parts}
            specs.append(ReadSpec(rank, _ids(local, here), _ids(remote, there), runs))
        return tuple(specs)


def generate_engine_transfer_plan(
    remote: EngineLayout, local: EngineLayout, local_rank: int, *, election: Election | None = None
) -> EngineTransferPlan:
    """Return the proved plan of one local rank: who is read from, and which bytes, for the life of the remote engine.

    Raises PlanError (UncoveredError, FormatMismatchError, MissingLayerError) when the engines cannot exchange cache.
    """
    chosen = election or elect(remote, local)
    pairs = plan_rank(remote, local, local_rank, election=chosen)
    return EngineTransferPlan(local_rank, {pair.source_rank: pair for pair in pairs}, chosen)


def _ids(tables: Sequence[BlockTable], groups: set[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, t.block_ids)) if i in groups else () for i, t in enumerate(tables))
