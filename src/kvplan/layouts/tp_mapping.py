"""The TP mapping as a query: declare what each rank holds, elect, and read the answer off. No formula per family.

vLLM 0.32 answers the same question with one formula per case (``nixl/tp_mapping.py``) and for TP sizes of which one
divides the other. Here the two engines are declared with one component per KV cache group and given to the planner's
election: whatever it elects for real layouts, it elects here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from kvplan.errors import LayoutError
from kvplan.layouts.parallel import held
from kvplan.planner import (
    Axis,
    BlockLayout,
    ComponentLayout,
    Election,
    EngineLayout,
    RankLayout,
    Region,
    Span,
    elect,
    plan_rank,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.layouts.topology import TransferTopology

GroupKind = Literal["attention", "mla", "state"]
"""What a KV cache group holds: heads that TP splits, a latent that TP repeats, or state whose heads TP splits."""


@dataclass(frozen=True, slots=True)
class TPMapping:
    """Whom one local rank reads from, for one remote engine. Made once, at the handshake."""

    source_ranks_per_group: tuple[tuple[int, ...], ...]
    """Per group, remote TP ranks that this rank reads from, in the order of the heads that they give."""
    all_source_ranks: tuple[int, ...]
    """Union over the groups, ascending."""
    rank_to_attention_slot: dict[int, int]
    """Per source rank, which piece of this rank's heads it holds (0 for a rank that gives no heads of ours)."""
    rank_offset_factor: int
    """Where our heads begin among the first attention source's, in units of our number of heads."""
    head_offsets: dict[int, int]
    """Per attention source rank, the index among its own heads of the first one that we need: exact for every TP."""
    readers: tuple[tuple[int, ...], ...]
    """Per remote rank, the local ranks that read from it."""

    @property
    def local_consumers(self) -> int:
        """Most local ranks that any one source of ours waits for."""
        return max((len(self.readers[rank]) for rank in self.all_source_ranks), default=0)


def compute_tp_mapping(
    transfer_topology: TransferTopology,
    remote_tp_size: int,
    group_kinds: Sequence[GroupKind],
    remote_dcp_size: int = 1,
    *,
    num_state_heads: int | None = None,
) -> TPMapping:
    """Return the mapping of one local rank to a remote engine, for any two TP sizes.

    ``num_state_heads`` is the number of state heads that TP splits; None means that both TP sizes divide it.
    Raises LayoutError for sizes that make no sense and PlanError where no rank holds what is needed.
    """
    here = transfer_topology
    if remote_tp_size < 1 or remote_dcp_size < 1 or remote_tp_size % remote_dcp_size:
        raise LayoutError(f"remote_tp_size {remote_tp_size} is not a multiple of remote_dcp_size {remote_dcp_size}")
    unknown = [kind for kind in group_kinds if kind not in get_args(GroupKind)]
    if unknown:
        raise LayoutError(f"group kind {unknown[0]!r} is not known; known: {', '.join(get_args(GroupKind))}")
    heads = num_state_heads or here.tp_size * remote_tp_size
    sides = [
        _declared(name, tp, dcp, group_kinds, here.total_num_kv_heads, heads, here.dcp_size * remote_dcp_size)
        for name, tp, dcp in (("remote", remote_tp_size, remote_dcp_size), ("local", here.tp_size, here.dcp_size))
    ]
    election = elect(*sides)
    per_group = _sources_per_group(sides[0], sides[1], here.tp_rank, election, len(group_kinds))
    attention = next((ranks for ranks, kind in zip(per_group, group_kinds, strict=True) if kind == "attention"), ())
    return _mapping(here, remote_tp_size, remote_dcp_size, per_group, attention, election)


def _declared(
    name: str, tp: int, dcp: int, kinds: Sequence[GroupKind], kv_heads: int, state_heads: int, tokens: int
) -> EngineLayout:
    ranks = [
        RankLayout(
            tuple(Region(group * (1 << 30), 1, 1 << 30) for group in range(len(kinds))),
            tuple(
                ComponentLayout(
                    f"group.{group}", kind, group, group, _block(kind, rank, tp, dcp, kv_heads, state_heads, tokens)
                )
                for group, kind in enumerate(kinds)
            ),
            tp=rank,
        )
        for rank in range(tp)
    ]
    return EngineLayout(name, tuple(ranks))


def _block(kind: GroupKind, rank: int, tp: int, dcp: int, kv_heads: int, state_heads: int, tokens: int) -> BlockLayout:
    if kind == "state":
        return BlockLayout((Axis("state_head", (Span(*held(rank, tp, state_heads), 0, 1),)),), 1, "uint8")
    own = tuple(Span(t, t + 1, t * (1 << 16)) for t in range(tokens) if t % dcp == rank % dcp)
    axes = [Axis("token", own)]
    if kind == "attention":
        axes.append(Axis("kv_head", (Span(*held(rank // dcp, tp // dcp, kv_heads), 0, 1),)))
    return BlockLayout(tuple(axes), 1, "uint8", tokens_per_block=tokens)


def _sources_per_group(
    remote: EngineLayout, local: EngineLayout, rank: int, election: Election, num_groups: int
) -> tuple[tuple[int, ...], ...]:
    found: list[dict[int, int]] = [{} for _ in range(num_groups)]
    for pair in plan_rank(remote, local, rank, election=election):
        for part in pair.parts:
            found[part.destination_group][pair.source_rank] = int(part.rows.destination_offset.min())
    return tuple(tuple(sorted(ranks, key=lambda r: (ranks[r] % (1 << 16), r))) for ranks in found)


def _mapping(
    here: TransferTopology,
    remote_tp: int,
    remote_dcp: int,
    per_group: tuple[tuple[int, ...], ...],
    attention: tuple[int, ...],
    election: Election,
) -> TPMapping:
    heads = here.total_num_kv_heads
    low, high = held(here.tp_rank // here.dcp_size, here.tp_size // here.dcp_size, heads)
    everyone = tuple(sorted({rank for ranks in per_group for rank in ranks}))
    theirs = {rank: held(rank // remote_dcp, remote_tp // remote_dcp, heads) for rank in everyone}
    slots = {theirs[rank][0]: i for i, rank in enumerate(attention)}
    offsets = {rank: max(0, low - theirs[rank][0]) for rank in attention}
    factor = offsets[attention[0]] // (high - low) if attention and here.tp_size > remote_tp else 0
    return TPMapping(
        source_ranks_per_group=per_group,
        all_source_ranks=everyone,
        rank_to_attention_slot={rank: slots.get(theirs[rank][0], 0) for rank in everyone},
        rank_offset_factor=factor,
        head_offsets=offsets,
        readers=election.readers,
    )
