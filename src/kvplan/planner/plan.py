"""Plans: which bytes of which blocks go from one rank to another, for the life of a pair of engines. No block ids.

1. Join the two sides by (layer, component); equal layouts are met, elected and proved once, then stamped.
2. Components that lie in the same pair of regions form one bucket; their rows are coalesced, so that K next to V,
   and layer next to layer in block-outermost layouts, become one run.
3. Buckets with equal rows become one part with many region pairs.

A plan that exists is proved: every destination atom is written exactly once, from its own source atom.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.planner.pairing import Pairing
from kvplan.planner.rows import Cells, Rows, coalesce, concatenate, rows_of, shifted
from kvplan.planner.summary import PlanSummary, summarise

if TYPE_CHECKING:
    from kvplan.planner.election import Election
    from kvplan.planner.layout import EngineLayout, Region
    from kvplan.planner.pairing import Share
    from kvplan.planner.table import Ints


class PlacedCells(NamedTuple):
    """Cells of one component and the base offsets at which it lies in its block."""

    cells: Cells
    source_bytes: int
    destination_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PlanPart:
    """Rows that many pairs of regions share: one group's blocks, one rank to one rank."""

    source_group: int
    destination_group: int
    source_tokens: int | None
    """Tokens per source block; None for state."""
    destination_tokens: int | None
    period_tokens: int | None
    """Tokens that the rows span; None for state, where one block meets one block."""
    rows: Rows
    placed: tuple[PlacedCells, ...]
    """What the rows were made of, for cutting them at a token."""
    source_regions: tuple[Region, ...]
    """One per region pair; all of one stride."""
    destination_regions: tuple[Region, ...]
    names: tuple[tuple[tuple[str, str], ...], ...]
    """(layer, component) per region pair and entry of ``placed``."""
    source_base: Ints = field(init=False)
    destination_base: Ints = field(init=False)
    """Base addresses of both sides' regions, int64, one per region pair."""
    source_blocks: int = field(init=False)
    destination_blocks: int = field(init=False)
    """Blocks that the smallest region of each side has."""

    def __post_init__(self) -> None:
        for side, regions in (("source", self.source_regions), ("destination", self.destination_regions)):
            object.__setattr__(self, f"{side}_base", np.array([region.base for region in regions], np.int64))
            object.__setattr__(self, f"{side}_blocks", min(region.num_blocks for region in regions))

    @property
    def num_regions(self) -> int:
        """Number of region pairs."""
        return len(self.source_regions)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that move, each once, in the source rank's order."""
        return tuple(dict.fromkeys(layer for pair in self.names for layer, _ in pair))

    def rows_until(self, token: int) -> Rows:
        """Return the rows of a period that ends at ``token`` (coordinate inside the period)."""
        return _rows([(rows_of(p.cells.clipped("token", token)), p) for p in self.placed])


@dataclass(frozen=True, slots=True, eq=False)
class PairPlan:
    """What one destination rank reads from one source rank."""

    source_rank: int
    """Index into the source engine's ranks."""
    destination_rank: int
    parts: tuple[PlanPart, ...]

    def summary(self) -> PlanSummary:
        """Return bytes, runs and run sizes, before any block is named."""
        return summarise(self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class EnginePlan:
    """Every pair of ranks of two engines that move anything."""

    source: EngineLayout
    destination: EngineLayout
    election: Election
    pairs: tuple[PairPlan, ...]
    not_moved: tuple[tuple[str, str], ...]
    """Optional (layer, component) that only one side holds."""

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per source rank, the destination ranks that read from it."""
        return self.election.readers

    @property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Per destination rank, the source ranks that it reads from."""
        return self.election.sources


def elect(source: EngineLayout, destination: EngineLayout, *, salt: int = 0) -> Election:
    """Return who reads from whom; both engines compute the same from the same two layouts.

    ``salt`` spreads several destination engines over replicas; both sides must use one value.
    Raises PlanError when the engines cannot exchange cache.
    """
    return Pairing(source, destination).elect(salt=salt)


def plan_rank(
    source: EngineLayout, destination: EngineLayout, destination_rank: int, *, election: Election | None = None
) -> tuple[PairPlan, ...]:
    """Return the proved plans of one destination rank, one per source rank that it reads from, ascending."""
    pairing = Pairing(source, destination)
    return _plan_rank(pairing, destination_rank, election or pairing.elect(salt=0))


def plan_engines(source: EngineLayout, destination: EngineLayout, *, salt: int = 0) -> EnginePlan:
    """Return the proved plans of all destination ranks."""
    pairing = Pairing(source, destination)
    election = pairing.elect(salt=salt)
    pairs = [pair for rank in range(len(destination.ranks)) for pair in _plan_rank(pairing, rank, election)]
    return EnginePlan(source, destination, election, tuple(pairs), pairing.not_moved)


class _Bucket(NamedTuple):
    """Shares that lie in one pair of regions and follow one pair of block tables."""

    share: Share
    shares: list[Share]


def _plan_rank(pairing: Pairing, destination_rank: int, election: Election) -> tuple[PairPlan, ...]:
    buckets: dict[tuple[int, int, int, int, int], list[Share]] = {}
    for share in pairing.shares(destination_rank, election):
        s, d = share.source, share.destination
        buckets.setdefault((share.source_rank, s.group, d.group, s.region, d.region), []).append(share)
    stamps: dict[tuple[object, ...], list[list[Share]]] = {}
    for key, shares in buckets.items():
        s_region, d_region = pairing.regions(shares[0], destination_rank)
        strides = (s_region.block_stride_bytes, d_region.block_stride_bytes)
        pattern = tuple((x.kind, x.source.block.base_bytes, x.destination.block.base_bytes) for x in shares)
        stamps.setdefault((*key[:3], strides, pattern), []).append(shares)
    parts: dict[int, list[PlanPart]] = {}
    for group in stamps.values():
        parts.setdefault(group[0][0].source_rank, []).append(_part(pairing, destination_rank, group))
    return tuple(PairPlan(rank, destination_rank, tuple(parts[rank])) for rank in sorted(parts))


def _part(pairing: Pairing, destination_rank: int, stamped: list[list[Share]]) -> PlanPart:
    first = stamped[0]
    placed = [
        (rows, PlacedCells(cells, x.source.block.base_bytes, x.destination.block.base_bytes))
        for x in first
        for cells, rows in zip(x.cells, x.rows, strict=True)
    ]
    regions = [pairing.regions(shares[0], destination_rank) for shares in stamped]
    names = [tuple(x.source.key for x in shares for _ in x.cells) for shares in stamped]
    meeting = first[0].meeting
    return PlanPart(
        source_group=first[0].source.group,
        destination_group=first[0].destination.group,
        source_tokens=meeting.source_tokens,
        destination_tokens=meeting.destination_tokens,
        period_tokens=meeting.period_tokens,
        rows=_rows(placed),
        placed=tuple(p for _, p in placed),
        source_regions=tuple(s for s, _ in regions),
        destination_regions=tuple(d for _, d in regions),
        names=tuple(names),
    )


def _rows(placed: list[tuple[Rows, PlacedCells]]) -> Rows:
    return coalesce(concatenate([shifted(rows, p.source_bytes, p.destination_bytes) for rows, p in placed]))
