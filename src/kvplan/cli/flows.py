"""Flows: what each pair of ranks moves for a sample request, and what it costs. No rendering.

Cost model, per rank: ``bytes / bandwidth + descriptors * cost``; a request takes as long as its slowest rank, sending
or receiving. Whether a pair is read straight or through the staging area is decided as a running engine does
(``session/binding.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvplan.planner import bind
from kvplan.session.binding import staging_terms
from kvplan.session.config import SessionConfig
from kvplan.session.routing import route
from kvplan.transport.cost import DEFAULTS, SCATTER, CostModel
from kvplan.transport.cost import Cost as ReadCost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.cli.request_file import Request
    from kvplan.planner import Descriptors, EnginePlan, PairPlan, PlanPart

    Ranges = tuple[tuple[int, int], ...]


SPLIT_AXES = ("kv_head", "state_head", "channel")
"""Axes that are split over ranks, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What moving costs, per rank."""

    bandwidth_gbps: float = 25.0
    """Gigabytes a second."""
    descriptor_us: float = 3.0
    """Microseconds that each descriptor adds."""
    scatter: ReadCost = SCATTER
    """What a local scatter out of staging costs."""

    def seconds(self, num_bytes: int, num_descriptors: int) -> float:
        """Return the time that one rank needs."""
        return num_bytes / (self.bandwidth_gbps * 1e9) + num_descriptors * self.descriptor_us * 1e-6

    @property
    def model(self) -> CostModel:
        """What a session with this cost of reads decides on."""
        read = ReadCost(DEFAULTS["nixl"].post_s, self.descriptor_us * 1e-6, self.bandwidth_gbps * 1e9)
        return CostModel(read, self.scatter)

    @staticmethod
    def measured(model: CostModel) -> Cost:
        """Return the cost that a model states, but for what a batch costs by itself."""
        return Cost(model.read.bytes_per_s / 1e9, model.read.descriptor_s * 1e6, model.scatter)


@dataclass(frozen=True, slots=True)
class GroupShare:
    """What one pair moves of one source group."""

    group: int
    layers: tuple[str, ...]
    components: tuple[str, ...]
    held: tuple[tuple[str, Ranges], ...]
    """(axis, intervals) that move, the token axis apart."""
    tokens: int | None
    """Tokens that move between this pair; None for state."""
    kept: int | None
    """Tokens that both engines keep; None for state."""
    num_bytes: int
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class Flow:
    """What one destination rank reads from one source rank for the sample."""

    source_rank: int
    destination_rank: int
    shares: tuple[GroupShare, ...]
    num_bytes: int
    num_descriptors: int
    smallest_run: int
    median_run: int
    read_bytes: int
    """Bytes that cross: more than ``num_bytes`` when gaps are read into staging."""
    read_descriptors: int
    staged: bool
    why: str
    """Why it is read straight or staged."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers that move, each once."""
        return tuple(dict.fromkeys(layer for share in self.shares for layer in share.layers))

    @property
    def held(self) -> tuple[tuple[str, Ranges], ...]:
        """(axis, intervals) over all groups."""
        found: dict[str, list[tuple[int, int]]] = {}
        for share in self.shares:
            for axis, ranges in share.held:
                found.setdefault(axis, []).extend(ranges)
        return tuple((axis, union(found[axis])) for axis in SPLIT_AXES if axis in found)


def flows(plan: EnginePlan, request: Request, cost: Cost) -> tuple[Flow, ...]:
    """Return the flow of every pair, in the plan's order."""
    return tuple(_flow(plan, pair, request, cost) for pair in plan.pairs)


def predicted_seconds(found: Sequence[Flow], cost: Cost) -> float:
    """Return how long the slowest rank takes."""
    load: dict[tuple[str, int], tuple[int, int]] = {}
    for flow in found:
        for rank in (("source", flow.source_rank), ("destination", flow.destination_rank)):
            num_bytes, count = load.get(rank, (0, 0))
            load[rank] = (num_bytes + flow.read_bytes, count + flow.read_descriptors)
    return max((cost.seconds(*total) for total in load.values()), default=0.0)


def union(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return intervals joined where they touch.

    >>> union([(4, 6), (0, 2), (2, 4), (8, 9)])
    ((0, 6), (8, 9))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def _flow(plan: EnginePlan, pair: PairPlan, request: Request, cost: Cost) -> Flow:
    by_group: dict[int, list[PlanPart]] = {}
    for part in pair.parts:
        by_group.setdefault(part.source_group, []).append(part)
    shares = tuple(_share(group, pair, parts, request) for group, parts in sorted(by_group.items()))
    runs = _bind(pair, request)
    sizes = runs.num_bytes
    reads, crossing, staged, why = _route(plan, pair, runs, cost)
    return Flow(
        source_rank=pair.source_rank,
        destination_rank=pair.destination_rank,
        shares=shares,
        num_bytes=runs.total_bytes,
        num_descriptors=len(runs),
        smallest_run=int(sizes.min()) if len(sizes) else 0,
        median_run=int(np.median(sizes)) if len(sizes) else 0,
        read_bytes=crossing,
        read_descriptors=reads,
        staged=staged,
        why=why,
    )


def _bind(pair: PairPlan, request: Request) -> Descriptors:
    return bind(
        pair,
        request.source,
        request.destination,
        num_tokens=request.num_tokens,
        whole_blocks=False,
        require_cover=False,
    )


def _route(plan: EnginePlan, pair: PairPlan, runs: Descriptors, cost: Cost) -> tuple[int, int, bool, str]:
    """Return (descriptors that are posted, bytes that cross, staged?, why)."""
    config, model = SessionConfig(), cost.model
    remote, local = plan.source.ranks[pair.source_rank], plan.destination.ranks[pair.destination_rank]
    terms = staging_terms(remote, local, config)
    way = route(runs, model, terms)
    limit = int(min(model.long_run_bytes, config.staging_threshold_bytes))
    num_fine = int((runs.num_bytes < limit).sum())
    if way.staged:
        saved = 1 - way.chosen_s / way.straight_s
        staged = len(runs) - len(way.straight)
        count = way.num_reads - len(way.straight)
        why = f"{staged:,} runs become {count:,} reads and a local scatter, which saves {saved:.0%} of the time"
    elif not num_fine:
        why = f"no run is under {limit:,} B"
    elif not terms.slot_bytes:
        why = f"{num_fine:,} runs are under {limit:,} B, but staging is for host memory and these ranks are on GPUs"
    else:
        why = f"{num_fine:,} runs are under {limit:,} B, but lie so far apart that staging saves too little"
    return way.num_reads, way.read_bytes, bool(way.staged), why


def _share(group: int, pair: PairPlan, parts: list[PlanPart], request: Request) -> GroupShare:
    runs = _bind(replace(pair, parts=tuple(parts)), request)
    held: dict[str, list[tuple[int, int]]] = {}
    components: dict[str, None] = {}
    for part in parts:
        for i, placed in enumerate(part.placed):
            component = part.names[0][i][1]
            components |= dict.fromkeys(names[i][1] for names in part.names)
            for axis, pieces in zip(placed.cells.names, placed.cells.axes, strict=True):
                if axis in {"kv_head", "state_head"} or (axis == "channel" and component == "ssm"):
                    held.setdefault(axis, []).extend(zip(pieces.start.tolist(), pieces.stop.tolist(), strict=True))
    return GroupShare(
        group=group,
        layers=tuple(dict.fromkeys(layer for part in parts for layer in part.layers)),
        components=tuple(components),
        held=tuple((axis, union(ranges)) for axis, ranges in held.items()),
        tokens=_tokens(parts[0], request),
        kept=None if parts[0].period_tokens is None else request.num_tokens - _first(parts[0], request),
        num_bytes=runs.total_bytes,
        num_descriptors=len(runs),
    )


def _tokens(part: PlanPart, request: Request) -> int | None:
    """Return the tokens that one part moves: those kept at both ends, and this pair's share of them."""
    if part.period_tokens is None:
        return None
    first = _first(part, request)
    cells = part.placed[0].cells
    pieces = cells.axes[cells.names.index("token")]
    start, stop = (edge.reshape(1, -1) for edge in (pieces.start, pieces.stop))
    periods = np.arange(-(-request.num_tokens // part.period_tokens)).reshape(-1, 1) * part.period_tokens
    low, high = np.maximum(start + periods, first), np.minimum(stop + periods, request.num_tokens)
    return int(np.maximum(high - low, 0).sum())


def _first(part: PlanPart, request: Request) -> int:
    """Return the first token that both engines keep."""
    return max(request.source[part.source_group].first_token, request.destination[part.destination_group].first_token)
