"""Routes: which runs of one request are read straight into their blocks, and which pass through the staging area.

1. A run that is too long to gain anything goes straight.
2. The others are joined to extents: neighbours in the source's memory, gaps included.
3. The cost model says for each extent what its runs cost one by one, and what one read and a scatter cost.
4. The cheaper way is taken, extent by extent; where staging saves too little in all, nothing is staged.

It is decided for every request anew, on its bound runs: the same plan brings long runs where block ids run on, and
short ones where they do not. ``kvplan explain`` uses this function too. Nothing is posted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvplan.planner import Descriptors, Extents, extents, filled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.planner import StagedChunk
    from kvplan.transport.cost import CostModel

WORTHWHILE = 0.9
"""Share of the straight way's seconds that the staged one must stay under: models are not that exact."""


PARTS = 4
"""Parts into which what is staged is cut, at least, unless they would become too small."""


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What may be staged between two ranks; see ``SessionConfig``."""

    source_bases: NDArray[np.int64]
    """Addresses at which the source rank's regions begin."""
    slot_bytes: int
    """Most that is staged at one time; 0 turns staging off."""
    run_bytes: int
    """Runs of this length or more are never staged."""
    read_bytes: int
    """Largest single read into staging."""
    gap_bytes: int
    """Largest gap that is read along."""
    chunk_bytes: int
    """Least that one chunk brings when there are several."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How the runs of one request travel between one pair of ranks."""

    straight: Descriptors
    staged: tuple[StagedChunk, ...]
    """In the order of the source; staging addresses count from 0 in each."""
    straight_s: float
    """What the cost model says of reading everything straight."""
    chosen_s: float
    """What it says of this route; the same where nothing is staged."""

    @property
    def num_reads(self) -> int:
        """Descriptors that are posted."""
        return len(self.straight) + sum(len(chunk.reads) for chunk in self.staged)

    @property
    def read_bytes(self) -> int:
        """Bytes that cross, gaps included."""
        return self.straight.total_bytes + sum(chunk.reads.total_bytes for chunk in self.staged)


def route(runs: Descriptors, cost: CostModel, terms: Terms) -> Route:
    """Return the cheaper way for every run."""
    straight_s = cost.read.seconds(runs.total_bytes, len(runs))
    fine = runs.num_bytes < min(cost.long_run_bytes, terms.run_bytes, terms.slot_bytes)
    if not fine.any():
        return Route(runs, (), straight_s, straight_s)
    gap_bytes, read_bytes = min(terms.gap_bytes, int(cost.gap_bytes)), min(terms.read_bytes, terms.slot_bytes)
    found = extents(_of(runs, fine), terms.source_bases, gap_bytes=gap_bytes, max_read_bytes=read_bytes)
    staged_s, singly_s = _seconds(found, cost)
    chosen = staged_s < singly_s
    saved_s = float((singly_s - staged_s)[chosen].sum()) - cost.scatter.post_s
    if saved_s <= (1 - WORTHWHILE) * straight_s:
        return Route(runs, (), straight_s, straight_s)
    kept, rest = found.split(chosen)
    chunks = filled(kept, staging_address=0, staging_bytes=_chunk_bytes(kept, terms))
    return Route(_joined(_of(runs, ~fine), rest), chunks, straight_s, straight_s - saved_s)


def _chunk_bytes(kept: Extents, terms: Terms) -> int:
    """Return how much is staged at one time: a part of the whole, so that it is scattered while the next is read."""
    part = -(-int(kept.num_bytes.sum()) // PARTS)
    return min(terms.slot_bytes, max(part, terms.chunk_bytes, int(kept.num_bytes.max())))


def _seconds(found: Extents, cost: CostModel) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what each extent costs when it is staged, and when its runs are read one by one."""
    num_runs, useful = found.num_runs, found.useful_bytes
    staged = cost.read.shares(found.num_bytes, 1) + cost.scatter.shares(useful, num_runs)
    return staged, cost.read.shares(useful, num_runs)


def _of(runs: Descriptors, chosen: NDArray[np.bool_]) -> Descriptors:
    if chosen.all():
        return runs
    return Descriptors(runs.source_address[chosen], runs.destination_address[chosen], runs.num_bytes[chosen])


def _joined(one: Descriptors, other: Descriptors) -> Descriptors:
    if not len(one) or not len(other):
        return other if not len(one) else one
    return Descriptors(
        np.concatenate([one.source_address, other.source_address]),
        np.concatenate([one.destination_address, other.destination_address]),
        np.concatenate([one.num_bytes, other.num_bytes]),
    )
