"""Staging: few large reads into a scratch area, then many small local copies. The same bytes, in two hops.

Where runs are too fine for a transport, the source's bytes are read as they lie, gaps included, and scattered locally:

1. Order the runs by source place; runs that lie closer than ``gap_bytes`` apart form one extent.
2. An extent never spans two regions, and is cut at ``max_read_bytes``.
3. Extents are laid one after another into the staging area; what does not fit goes into the next chunk.

It works on bound descriptors, so it knows no axis: whatever was proved of them stays true.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import BindError
from kvplan.planner.descriptors import Descriptors
from kvplan.planner.rows import run_starts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvplan.planner.layout import Region
    from kvplan.planner.table import Ints


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """One filling of the staging area."""

    reads: Descriptors
    """Remote memory to the staging area."""
    scatter: Descriptors
    """The staging area to the destination; to be done when all reads have ended."""


def stage(
    runs: Descriptors,
    regions: Sequence[Region],
    *,
    staging_address: int,
    staging_bytes: int,
    gap_bytes: int,
    max_read_bytes: int,
) -> tuple[StagedChunk, ...]:
    """Return the chunks that move ``runs`` through a staging area of ``staging_bytes`` bytes.

    ``regions`` are the source rank's. Raises BindError when one run does not fit into the area.
    """
    if len(runs) == 0:
        return ()
    source = runs.source_address.astype(np.int64)
    order = np.argsort(source, kind="stable")
    source, num_bytes = source[order], runs.num_bytes.astype(np.int64)[order]
    destination = runs.destination_address.astype(np.int64)[order]
    if int(num_bytes.max()) > staging_bytes:
        raise BindError(f"a run of {int(num_bytes.max())} bytes does not fit into a staging area of {staging_bytes}")
    first = _extents(source, num_bytes, regions, gap_bytes, min(max_read_bytes, staging_bytes))
    start = source[first]
    end = np.maximum.reduceat(source + num_bytes, first)
    return tuple(_chunks(source, destination, num_bytes, first, start, end - start, staging_address, staging_bytes))


def _extents(source: Ints, num_bytes: Ints, regions: Sequence[Region], gap_bytes: int, limit: int) -> Ints:
    """Return the indices of the runs that begin an extent: after a gap, in another region, or past the limit."""
    end = np.maximum.accumulate(source + num_bytes)
    bases = np.sort(np.array([region.base for region in regions], np.int64))
    home = np.searchsorted(bases, source, side="right")
    first = run_starts((source[1:] <= end[:-1] + gap_bytes) & (home[1:] == home[:-1]))
    bounds = [*first.tolist(), len(source)]
    cuts: list[int] = []
    for begin, stop in itertools.pairwise(bounds):
        at = begin
        while at < stop:
            cuts.append(at)
            at = max(at + 1, int(np.searchsorted(end[:stop], int(source[at]) + limit, side="right")))
    return np.array(cuts, np.int64)


def _chunks(
    source: Ints,
    destination: Ints,
    num_bytes: Ints,
    first: Ints,
    start: Ints,
    length: Ints,
    staging_address: int,
    staging_bytes: int,
) -> Iterator[StagedChunk]:
    total = np.concatenate([[0], np.cumsum(length)])
    bounds = np.concatenate([first, [len(source)]])
    begin = 0
    while begin < len(first):
        stop = int(np.searchsorted(total, total[begin] + staging_bytes, side="right")) - 1
        place = staging_address + total[begin:stop] - total[begin]
        runs = slice(int(bounds[begin]), int(bounds[stop]))
        shift = np.repeat(place - start[begin:stop], np.diff(bounds[begin : stop + 1]))
        yield StagedChunk(
            _descriptors(start[begin:stop], place, length[begin:stop]),
            _descriptors(source[runs] + shift, destination[runs], num_bytes[runs]),
        )
        begin = stop


def _descriptors(source: Ints, destination: Ints, num_bytes: Ints) -> Descriptors:
    return Descriptors(*(np.ascontiguousarray(column).view(np.uint64) for column in (source, destination, num_bytes)))
