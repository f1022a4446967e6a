"""Local copies: many small runs between two places of this process's CPU memory. No peers, no devices but the CPU.

Scattered runs are seldom irregular: rows of a block, blocks of a layer. So, per length of run:

1. Runs at constant steps on both sides become one strided copy; such groups at constant steps become one again.
2. Where that leaves few runs per copy, an indexing of two views of memory copies them: an element of a view is a whole
   run, its only axis steps by single bytes, so an index is an address. Slices of it stay in the cache.
3. Long irregular runs are copied one by one.

numpy does the first two without the GIL, provided that one call does enough: other threads, an engine's above all,
must not wait for a loop of many small ones.
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

WORTH_A_VIEW = 512
"""Mean runs per strided copy from which those win. numpy keeps the GIL for fewer than 500 items."""

MAX_KINDS = 64
"""Shapes of groups that are looked at; runs with more of them are irregular."""

LONG_RUN_BYTES = 32 << 10
"""Irregular runs from here on are copied one by one: an index copies twice, and a loop's turn does not count here."""

SLICE_RUNS = 512
"""Least runs that one indexing moves; see ``WORTH_A_VIEW``."""

SLICE_BYTES = 96 << 10
"""Bytes that it moves if its runs are short: what it gathers is still in the cache when it is put down."""

SAMPLE_RUNS = 4096
"""Runs that are looked at first: where these are irregular, the rest is not looked at."""

MAX_LENGTHS = 16
"""Lengths of runs that are copied one after the other; with more of them, runs are cut to their common divisor."""

UNIT_BYTES = 64
"""Least common divisor that runs are cut to."""


class _Groups(NamedTuple):
    """Groups of things at constant steps on both sides, int64 arrays of one length."""

    source: Ints
    destination: Ints
    rows: Ints
    """Things in the group."""
    source_step: Ints
    destination_step: Ints


class _View(NamedTuple):
    """One strided copy: groups of one shape at constant steps."""

    source: int
    destination: int
    repeats: int
    """Groups."""
    rows: int
    """Runs of each."""
    source_outer: int
    destination_outer: int
    source_step: int
    destination_step: int


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
    lengths = np.unique(size)
    if len(lengths) > MAX_LENGTHS:
        if size.mean() >= LONG_RUN_BYTES:
            _copy_singly(here, there, source, destination, size)
            return
        if int(np.gcd.reduce(lengths)) >= UNIT_BYTES:
            source, destination, lengths = _cut(source, destination, size, int(np.gcd.reduce(lengths)))
    if len(lengths) == 1:
        _copy_equal(here, there, source, destination, int(lengths[0]))
        return
    for length in lengths.tolist():
        same = size == length
        _copy_equal(here, there, source[same], destination[same], length)


def _memory(address: Ints, size: Ints) -> Bytes:
    """Return the bytes from the lowest address to the end of the highest run."""
    low, high = int(address.min()), int((address + size).max())
    return np.frombuffer(memoryview((ctypes.c_uint8 * (high - low)).from_address(low)), dtype=np.uint8)


def _cut(source: Ints, destination: Ints, size: Ints, unit: int) -> tuple[Ints, Ints, Ints]:
    """Return the same bytes as runs of ``unit`` bytes, and their one length."""
    count = size // unit
    within = (np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)) * unit
    return np.repeat(source, count) + within, np.repeat(destination, count) + within, np.array([unit])


def _copy_equal(here: Bytes, there: Bytes, source: Ints, destination: Ints, length: int) -> None:
    one = np.dtype((np.void, length))
    views = _views(source, destination)
    if views is not None:
        for v in views:
            target = np.ndarray(v[2:4], one, there, v.destination, (v.destination_outer, v.destination_step))
            np.copyto(target, np.ndarray(v[2:4], one, here, v.source, (v.source_outer, v.source_step)))
    elif length < LONG_RUN_BYTES:
        _copy_indexed(here, there, source, destination, one)
    else:
        _copy_singly(here, there, source, destination, np.broadcast_to(np.int64(length), source.shape))


def _copy_singly(here: Bytes, there: Bytes, source: Ints, destination: Ints, size: Ints) -> None:
    for s, d, n in zip(source.tolist(), destination.tolist(), size.tolist(), strict=True):
        there[d : d + n] = here[s : s + n]


def _copy_indexed(here: Bytes, there: Bytes, source: Ints, destination: Ints, one: np.dtype[np.void]) -> None:
    """Copy runs by their addresses."""
    origin = np.ndarray((len(here) - one.itemsize + 1,), one, here, 0, (1,))
    target = np.ndarray((len(there) - one.itemsize + 1,), one, there, 0, (1,))
    step = max(SLICE_RUNS, SLICE_BYTES // one.itemsize)
    for at in range(0, len(source), step):
        target[destination[at : at + step]] = origin[source[at : at + step]]


def _views(source: Ints, destination: Ints) -> list[_View] | None:
    """Return the strided copies that together copy all runs, or None when there would be too many."""
    if len(source) < WORTH_A_VIEW:
        return None
    if len(source) > 2 * SAMPLE_RUNS and _views(source[:SAMPLE_RUNS], destination[:SAMPLE_RUNS]) is None:
        return None
    most = len(source) // WORTH_A_VIEW
    groups = _grouped(source, destination)
    kinds, which = _kinds(groups)
    if len(kinds) > min(MAX_KINDS, most):
        return None
    found: list[_View] = []
    for kind, (rows, s_step, d_step) in enumerate(kinds.tolist()):
        own = which == kind
        outer = _grouped(groups.source[own], groups.destination[own])
        if len(found) + len(outer.rows) > most:
            return None
        columns = zip(*(column.tolist() for column in outer), strict=True)
        found += [_View(s, d, n, rows, s_outer, d_outer, s_step, d_step) for s, d, n, s_outer, d_outer in columns]
    return found


def _kinds(groups: _Groups) -> tuple[Ints, Ints]:
    """Return the distinct (rows, source step, destination step), and which of them each group has.

    Where a few groups show already that there are too many, only those few are looked at.
    """
    shape = np.stack([groups.rows, groups.source_step, groups.destination_step], axis=1)
    for part in (shape[: 4 * MAX_KINDS], shape):
        if (part == part[0]).all():
            kinds, which = part[:1], np.zeros(len(part), np.int64)
        else:
            kinds, which = np.unique(part, axis=0, return_inverse=True)
        if len(kinds) > MAX_KINDS:
            break
    return kinds, which.reshape(-1)


def _grouped(source: Ints, destination: Ints) -> _Groups:
    """Return groups of neighbours at constant steps, taken greedily from the first."""
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
