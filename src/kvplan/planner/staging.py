"""Staging: few large reads into a scratch area, then many small local copies. The same bytes, in two hops.

Where runs are too fine for a transport, the source's bytes are read as they lie, gaps included, and scattered locally:

1. Order the runs by source place; runs that lie at most ``gap_bytes`` apart form one extent.
2. An extent never spans two regions; one that is longer than ``max_read_bytes`` is cut between runs.
3. Extents are laid one after another into the staging area; what does not fit goes into the next chunk.

Which extents are worth it is somebody else's question (``Extents.split``). All this works on bound descriptors, so it
knows no axis: whatever was proved of them stays true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import BindError
from kvplan.planner.descriptors import Descriptors
from kvplan.planner.rows import run_starts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvplan.planner.layout import Region
    from kvplan.planner.table import Ints


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """One filling of the staging area."""

    reads: Descriptors
    """Remote memory to the staging area."""
    scatter: Descriptors
    """The staging area to the destination; to be done when all reads have ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Runs in source order, and which neighbours one read could bring together."""

    source: Ints
    destination: Ints
    run_bytes: Ints
    """Source address, destination address and bytes of every run."""
    first: Ints
    """Index of each extent's first run."""
    num_bytes: Ints
    """Bytes from the beginning of each extent's first run to the end of its last, gaps included."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def num_runs(self) -> Ints:
        """Runs of each extent."""
        return np.diff(np.append(self.first, len(self.source)))

    @property
    def useful_bytes(self) -> Ints:
        """Bytes of each extent's runs: what is left of ``num_bytes`` without gaps."""
        return np.add.reduceat(self.run_bytes, self.first) if len(self) else np.empty(0, np.int64)

    def split(self, chosen: NDArray[np.bool_]) -> tuple[Extents, Descriptors]:
        """Return the chosen extents, and the runs of all others."""
        if chosen.all():
            return self, _descriptors(*(np.empty(0, np.int64) for _ in range(3)))
        own = np.repeat(chosen, self.num_runs)
        rest = _descriptors(self.source[~own], self.destination[~own], self.run_bytes[~own])
        count = self.num_runs[chosen]
        first = np.cumsum(count) - count
        taken = (self.source[own], self.destination[own], self.run_bytes[own], first, self.num_bytes[chosen])
        return Extents(*taken), rest


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
    bases = np.array([region.base for region in regions], np.int64)
    found = extents(runs, bases, gap_bytes=gap_bytes, max_read_bytes=min(max_read_bytes, staging_bytes))
    return filled(found, staging_address=staging_address, staging_bytes=staging_bytes)


def extents(runs: Descriptors, region_bases: Ints, *, gap_bytes: int, max_read_bytes: int) -> Extents:
    """Return the runs in source order, with neighbours of one region joined to extents.

    ``region_bases`` are the addresses at which the source rank's regions begin, int64, in any order.
    """
    source, destination, num_bytes = (column.view(np.int64) for column in _columns(runs))
    if not len(source):
        return Extents(source, destination, num_bytes, source, source)
    if not (source[1:] >= source[:-1]).all():
        order = np.argsort(source)
        source, destination, num_bytes = source[order], destination[order], num_bytes[order]
    end = np.maximum.accumulate(source + num_bytes)
    continues = source[1:] <= end[:-1] + gap_bytes
    begins = np.searchsorted(source, region_bases)
    continues[begins[(begins > 0) & (begins < len(source))] - 1] = False
    first = run_starts(continues)
    first = _shortened(source, first, np.maximum.reduceat(end, first) - source[first], max_read_bytes, num_bytes)
    return Extents(
        source, destination, num_bytes, first, np.maximum.reduceat(source + num_bytes, first) - source[first]
    )


def filled(found: Extents, *, staging_address: int, staging_bytes: int) -> tuple[StagedChunk, ...]:
    """Return the chunks that read extents into a staging area. Raises BindError when one does not fit into it."""
    if len(found) and int(found.num_bytes.max()) > staging_bytes:
        raise BindError(
            f"a run of {int(found.num_bytes.max())} bytes does not fit into a staging area of {staging_bytes}"
        )
    return tuple(_chunks(found, staging_address, staging_bytes))


def _shortened(source: Ints, first: Ints, length: Ints, limit: int, num_bytes: Ints) -> Ints:
    """Return the first runs of extents that are cut so that none is longer than ``limit``, or than one run.

    An extent is cut where its runs begin in another cell of a grid, so narrow that the longest run may begin anywhere.
    """
    if int(length.max()) <= limit:
        return first
    grid = max(1, limit - int(num_bytes.max()))
    count = np.diff(np.append(first, len(source)))
    cell = (source - np.repeat(source[first], count)) // grid
    cell[np.repeat(length <= limit, count)] = 0
    same = cell[1:] == cell[:-1]
    same[first[1:] - 1] = False
    return run_starts(same)


def _chunks(found: Extents, staging_address: int, staging_bytes: int) -> Iterator[StagedChunk]:
    total = np.concatenate([[0], np.cumsum(found.num_bytes)])
    bounds = np.append(found.first, len(found.source))
    start = found.source[found.first]
    begin = 0
    while begin < len(found):
        stop = int(np.searchsorted(total, total[begin] + staging_bytes, side="right")) - 1
        place = staging_address + total[begin:stop] - total[begin]
        runs = slice(int(bounds[begin]), int(bounds[stop]))
        shift = np.repeat(place - start[begin:stop], np.diff(bounds[begin : stop + 1]))
        yield StagedChunk(
            _descriptors(start[begin:stop], place, found.num_bytes[begin:stop]),
            _descriptors(found.source[runs] + shift, found.destination[runs], found.run_bytes[runs]),
        )
        begin = stop


def _columns(runs: Descriptors) -> tuple[NDArray[np.uint64], ...]:
    return runs.source_address, runs.destination_address, runs.num_bytes


def _descriptors(source: Ints, destination: Ints, num_bytes: Ints) -> Descriptors:
    return Descriptors(*(np.ascontiguousarray(column).view(np.uint64) for column in (source, destination, num_bytes)))
