"""Local copies: many small runs between two places of this process's CPU memory. No peers, no devices but the CPU.

Scattered runs are seldom irregular: rows of a block, blocks of a layer. So, per length of run:

1. Runs at constant steps on both sides become one strided copy; such groups at constant steps become one again.
2. Where that leaves groups of few runs, short runs are gathered by index, through the widest word that divides their
   addresses and lengths, in slices so that the index arrays stay small; long runs are copied one by one.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    UInts = NDArray[np.uint64]
    Ints = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

WORTH_A_VIEW = 4
"""Mean runs per group from which strided copies win: making two views costs about as much as copying so many runs."""

LONG_RUN_BYTES = 512
"""Irregular runs from here on are copied one by one: about where the gather costs as much."""

GATHER_WORDS = 1 << 18
"""Words that one gather moves: 2 MiB of index, which stays in the cache."""


class _Groups(NamedTuple):
    """Groups of things at constant steps on both sides, int64 arrays of one length."""

    source: Ints
    destination: Ints
    rows: Ints
    """Things in the group."""
    source_step: Ints
    destination_step: Ints


def copy_runs(source_address: UInts, destination_address: UInts, num_bytes: UInts) -> None:
    """Copy every run; the runs' destinations must not overlap one another or any source.

    All three are uint64 arrays of one length: absolute addresses in this process, bytes. The caller has checked that
    they lie in memory of ours: nothing here can.
    """
    if not len(num_bytes):
        return
    source, destination, size = (column.view(np.int64) for column in (source_address, destination_address, num_bytes))
    here, there = _memory(source, size), _memory(destination, size)
    source, destination = source - int(source.min()), destination - int(destination.min())
    for length in np.unique(size).tolist():
        same = size == length
        if same.all():
            _copy_equal(here, there, source, destination, length)
        else:
            _copy_equal(here, there, source[same], destination[same], length)


def _memory(address: Ints, size: Ints) -> Bytes:
    """Return the bytes from the lowest address to the end of the highest run."""
    low, high = int(address.min()), int((address + size).max())
    return np.frombuffer(memoryview((ctypes.c_uint8 * (high - low)).from_address(low)), dtype=np.uint8)


def _copy_equal(here: Bytes, there: Bytes, source: Ints, destination: Ints, length: int) -> None:
    groups = _grouped(source, destination)
    if len(source) >= WORTH_A_VIEW * len(groups.rows):
        _copy_strided(here, there, groups, length)
    elif length < LONG_RUN_BYTES:
        _gather(here, there, source, destination, length)
    else:
        for s, d in zip(source.tolist(), destination.tolist(), strict=True):
            there[d : d + length] = here[s : s + length]


def _grouped(source: Ints, destination: Ints) -> _Groups:
    """Return groups of neighbours at constant steps, taken greedily from the first run."""
    s_step, d_step = np.diff(source), np.diff(destination)
    turn = np.flatnonzero((s_step[1:] != s_step[:-1]) | (d_step[1:] != d_step[:-1])) + 1
    # The step after a turn leads from one group to the next, so of turns in a row only every other starts a group.
    begins = np.diff(turn, prepend=-1) > 1
    chain = turn[begins][np.cumsum(begins) - 1] if len(turn) else turn
    first = np.concatenate([[0], turn[(turn - chain) % 2 == 0] + 1])
    rows = np.diff(np.concatenate([first, [len(source)]]))
    lone = rows == 1
    at = np.minimum(first, max(0, len(s_step) - 1))
    steps = (s_step, d_step) if len(s_step) else (np.zeros(1, np.int64),) * 2
    return _Groups(source[first], destination[first], rows, *(np.where(lone, 0, step[at]) for step in steps))


def _copy_strided(here: Bytes, there: Bytes, groups: _Groups, length: int) -> None:
    """Copy each group by one strided copy; groups of one shape that lie at constant steps by one together."""
    shape = np.stack([groups.rows, groups.source_step, groups.destination_step], axis=1)
    kinds, which = np.unique(shape, axis=0, return_inverse=True)
    which = which.reshape(-1)
    for kind, (rows, s_step, d_step) in enumerate(kinds.tolist()):
        own = which == kind
        outer = _grouped(groups.source[own], groups.destination[own])
        for s, d, repeats, s_outer, d_outer in zip(*(column.tolist() for column in outer), strict=True):
            size = (repeats, rows, length)
            target = np.ndarray(size, np.uint8, there, d, (d_outer, d_step, 1))
            np.copyto(target, np.ndarray(size, np.uint8, here, s, (s_outer, s_step, 1)))


def _gather(here: Bytes, there: Bytes, source: Ints, destination: Ints, length: int) -> None:
    base = here.ctypes.data | there.ctypes.data
    word = _word(int(np.bitwise_or.reduce(source | destination)) | base | length)
    words = length // word
    turn = np.arange(words, dtype=np.int64)
    wide, target = _words(here, word), _words(there, word)
    step = max(1, GATHER_WORDS // words)
    for at in range(0, len(source), step):
        s, d = source[at : at + step, None] // word + turn, destination[at : at + step, None] // word + turn
        target[d] = wide[s]


def _word(bits: int) -> int:
    """Return the widest of 8, 4, 2, 1 that divides every number whose bits were or-ed together.

    >>> _word(0b1100)
    4
    """
    return min(8, bits & -bits)


def _words(memory: Bytes, word: int) -> Bytes:
    """Return the memory as unsigned words; bytes at the end that make no whole word are left out."""
    words: Bytes = memory[: len(memory) // word * word].view(f"u{word}")
    return words
