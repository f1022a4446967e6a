"""Which byte ranges are registered, and whether descriptors lie inside them; nothing that moves bytes does.

Definition: a descriptor ``[a, b]`` (both ends inclusive) lies inside one range exactly when, among the ranges
that start at or before ``a``, the largest last byte is at least ``b``. So two sorted arrays decide all
descriptors of a batch with one binary search each, and ranges may overlap.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import NotRegisteredError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvplan.transport.base import Device, MemoryRange

    _Sorted = tuple[NDArray[np.uint64], NDArray[np.uint64]]


class RangeTable:
    """The registered ranges of one process. Safe to read while another thread adds."""

    def __init__(self, ranges: Iterable[MemoryRange] = ()) -> None:
        self._ranges: dict[MemoryRange, None] = {}
        self._sorted: dict[Device, _Sorted] = {}
        self.add(ranges)

    def __iter__(self) -> Iterator[MemoryRange]:
        return iter(tuple(self._ranges))

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, ranges: Iterable[MemoryRange]) -> tuple[MemoryRange, ...]:
        """Add ``ranges`` and return those that were not there yet."""
        new = tuple(dict.fromkeys(r for r in ranges if r not in self._ranges))
        known = self._ranges | dict.fromkeys(new)
        self._sorted = {device: _sort([r for r in known if r.device == device]) for device in {r.device for r in known}}
        self._ranges = known
        return new

    def find_outside(self, device: Device, address: NDArray[np.uint64], num_bytes: NDArray[np.uint64]) -> int | None:
        """Return the index of the first descriptor that is not inside one range, or None. Both arrays are (n,)."""
        if not len(address):
            return None
        if device not in self._sorted:
            return 0
        start, last = self._sorted[device]
        slot = np.searchsorted(start, address, side="right") - 1
        outside = np.flatnonzero((slot < 0) | (last[np.maximum(slot, 0)] < address + (num_bytes - np.uint64(1))))
        return int(outside[0]) if outside.size else None

    def check(
        self, side: str, peer: str, device: Device, address: NDArray[np.uint64], num_bytes: NDArray[np.uint64]
    ) -> None:
        """Raise NotRegisteredError for the first descriptor that is not inside one range."""
        index = self.find_outside(device, address, num_bytes)
        if index is not None:
            ranges = sum(r.device == device for r in self._ranges)
            raise NotRegisteredError(
                f"descriptor {index}: {side} bytes [{address[index]:#x}, +{num_bytes[index]}) on {device} do not lie "
                f"inside one registered range ({ranges} registered on that device)",
                peer=peer,
            )


def merge_overlapping(ranges: Iterable[MemoryRange]) -> tuple[MemoryRange, ...]:
    """Return ranges that cover the same bytes, none overlapping another. Adjacent ones stay apart.

    >>> from kvplan.transport.base import MemoryRange
    >>> merged = merge_overlapping([MemoryRange(8, 8), MemoryRange(0, 9), MemoryRange(16, 4)])
    >>> [(r.address, r.num_bytes) for r in merged]
    [(0, 16), (16, 4)]
    """
    merged: list[MemoryRange] = []
    for item in sorted(ranges, key=lambda r: (r.device.kind, r.device.index, r.address)):
        if merged and merged[-1].overlaps(item):
            first = merged.pop()
            stop = max(first.address + first.num_bytes, item.address + item.num_bytes)
            merged.append(replace(first, num_bytes=stop - first.address))
        else:
            merged.append(item)
    return tuple(merged)


def _sort(ranges: list[MemoryRange]) -> _Sorted:
    ordered = sorted(ranges, key=lambda r: r.address)
    start = np.array([r.address for r in ordered], dtype=np.uint64)
    last = np.array([r.address + r.num_bytes - 1 for r in ordered], dtype=np.uint64)
    return start, np.maximum.accumulate(last)
