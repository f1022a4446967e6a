"""Local copies: many small runs between two places of this process's CPU memory. No peers, no devices but the CPU.

Runs are sorted by size. Long ones are copied one by one; short ones of equal size by one gather through the widest
word that divides their addresses and sizes, in slices, so that the index arrays stay small.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    UInts = NDArray[np.uint64]
    Ints = NDArray[np.int64]

LONG_RUN_BYTES = 2048
"""Runs from here on are copied by memmove: measured equal to the gather at about this size."""

GATHER_WORDS = 1 << 18
"""Words that one gather moves: 2 MiB of index, which stays in the cache."""

_ADDRESSES = (1 << 63) - 1


def copy_runs(source_address: UInts, destination_address: UInts, num_bytes: UInts) -> None:
    """Copy every run; the runs' destinations must not overlap one another or any source.

    All three are uint64 arrays of one length: absolute addresses in this process, bytes. The caller has checked that
    they lie in memory of ours: nothing here can.
    """
    source, destination, size = (column.view(np.int64) for column in (source_address, destination_address, num_bytes))
    long = size >= LONG_RUN_BYTES
    for s, d, n in zip(source[long].tolist(), destination[long].tolist(), size[long].tolist(), strict=True):
        ctypes.memmove(d, s, n)
    short = ~long
    if short.any():
        source, destination, size = source[short], destination[short], size[short]
        for length in np.unique(size).tolist():
            same = size == length
            _gather(source[same], destination[same], int(length))


def _gather(source: Ints, destination: Ints, length: int) -> None:
    word = _word(int(np.bitwise_or.reduce(source | destination)) | length)
    words = length // word
    turn = np.arange(words, dtype=np.int64)
    here, there = _view(source, length, word), _view(destination, length, word)
    s_index, d_index = (source - int(source.min())) // word, (destination - int(destination.min())) // word
    step = max(1, GATHER_WORDS // words)
    for at in range(0, len(source), step):
        s, d = s_index[at : at + step, None] + turn, d_index[at : at + step, None] + turn
        there[d] = here[s]


def _word(bits: int) -> int:
    """Return the widest of 8, 4, 2, 1 that divides every address and size whose bits were or-ed together.

    >>> _word(0b1100)
    4
    """
    return min(8, bits & -bits)


def _view(address: Ints, length: int, word: int) -> NDArray[np.uint8]:
    """Return the memory from the lowest to the highest address, as unsigned words."""
    low, high = int(address.min()), int(address.max()) + length
    held = np.frombuffer(memoryview((ctypes.c_uint8 * (high - low)).from_address(low)), dtype=np.uint8)
    words: NDArray[np.uint8] = held.view(f"u{word}")
    return words
