"""Local gathers: rows of equal pieces, from scattered places of this process's CPU memory into one array. No peers.

A piece lies at ``origin[row] + place[column]``. What holds for the columns holds for every row, so:

1. Columns at constant steps make runs. Runs between the first and the last are cut to their greatest common length,
   which leaves one kind of run for whole blocks, and one for each ragged end.
2. Each kind is one indexing of a view of memory whose first axis steps by single bytes: an index is an address.
3. Where there are many kinds, or steps go backwards, every column is a run of its own.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

MAX_KINDS = 8
"""Kinds of runs that are gathered one after the other; with more of them, columns are gathered singly."""


class _Runs(NamedTuple):
    """Runs of columns, int64 arrays of one length."""

    first: Ints
    """Index of the first column."""
    length: Ints
    step: Ints
    """Bytes from column to column; 0 for a run of one."""


class Columns:
    """Columns of pieces, looked at once, for gathering any number of rows.

    >>> memory = np.arange(12, dtype=np.uint8)
    >>> Columns(np.array([0, 4]), 2).gather(np.array([0, 6]) + memory.ctypes.data)
    array([[ 0,  1,  4,  5],
           [ 6,  7, 10, 11]], dtype=uint8)
    """

    def __init__(self, place: Ints, num_bytes: int) -> None:
        self._place = place
        self._num_bytes = num_bytes
        self._kinds = _kinds(_cut(_runs(place)), len(place)) if len(place) else []

    def gather(self, origin: Ints) -> Bytes:
        """Return the pieces at ``origin[row] + place[column]``: uint8, (rows, columns * num_bytes).

        Addresses are absolute, int64. The caller has checked that they lie in memory of ours: nothing here can.
        """
        rows, columns, num_bytes = len(origin), len(self._place), self._num_bytes
        if not rows or not columns:
            return np.empty((rows, columns * num_bytes), np.uint8)
        low, high = int(origin.min() + self._place.min()), int(origin.max() + self._place.max()) + num_bytes
        memory = np.frombuffer(memoryview((ctypes.c_uint8 * (high - low)).from_address(low)), np.uint8)
        parts = [_gathered(memory, origin - low, self._place[kind.first], kind, num_bytes) for kind in self._kinds]
        if len(parts) == 1:
            return parts[0].reshape(rows, -1)
        result = np.empty((rows, columns, num_bytes), np.uint8)
        for kind, part in zip(self._kinds, parts, strict=True):
            result[:, _columns(kind)] = part.reshape(rows, -1, num_bytes)
        return result.reshape(rows, -1)


def _runs(place: Ints) -> _Runs:
    """Return runs of columns at constant steps, taken greedily from the first."""
    step = np.diff(place)
    turn = np.flatnonzero(step[1:] != step[:-1]) + 1
    # The step after a turn leads from one run to the next, so of turns in a row only every other starts a run.
    begins = np.diff(turn, prepend=-1) > 1
    chain = turn[begins][np.cumsum(begins) - 1] if len(turn) else turn
    first = np.concatenate([[0], turn[(turn - chain) % 2 == 0] + 1])
    length = np.diff(np.concatenate([first, [len(place)]]))
    padded = np.concatenate([step, [0]])
    return _Runs(first, length, np.where(length == 1, 0, padded[first]))


def _cut(runs: _Runs) -> _Runs:
    """Return the runs with those between the first and the last cut to their greatest common length."""
    if len(runs.length) < 3:
        return runs
    unit = int(np.gcd.reduce(runs.length[1:-1]))
    count = runs.length // unit
    count[[0, -1]] = 1
    length = np.where(np.arange(len(count)) % (len(count) - 1) == 0, runs.length, unit)
    index = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    length = length[index]
    step = np.where(length == 1, 0, runs.step[index])
    return _Runs(runs.first[index] + within * length, length, step)


def _kinds(runs: _Runs, columns: int) -> list[_Runs]:
    """Return the runs sorted apart by (length, step); as single columns where that does not pay or steps go back."""
    shape = np.stack([runs.length, runs.step], axis=1)
    kinds, which = np.unique(shape, axis=0, return_inverse=True)
    if len(kinds) > MAX_KINDS or int(runs.step.min()) < 0:
        every = np.arange(columns)
        return [_Runs(every, np.ones_like(every), np.zeros_like(every))]
    which = which.reshape(-1)
    return [_Runs(*(column[which == i] for column in runs)) for i in range(len(kinds))]


def _gathered(memory: Bytes, origin: Ints, place: Ints, kind: _Runs, num_bytes: int) -> Bytes:
    """Return the pieces of one kind, row by row; ``place`` of its runs, ``origin`` from the memory's first address."""
    word = min(8, num_bytes & -num_bytes)
    length, step = int(kind.length[0]), int(kind.step[0])
    reach = (length - 1) * step + num_bytes
    shape = (len(memory) - reach + 1, length, num_bytes // word)
    view: Bytes = np.ndarray(shape, f"u{word}", memory, 0, (1, step, word))
    # What indexing returns is laid out by the view's steps, which may be another order than that of its axes.
    pieces: Bytes = np.ascontiguousarray(view[origin[:, None] + place[None, :]])
    return pieces.view(np.uint8)


def _columns(kind: _Runs) -> Ints | slice:
    """Return the columns of a kind's runs, as a slice when they lie side by side."""
    first, length = int(kind.first[0]), int(kind.length[0])
    if (np.diff(kind.first) == length).all():
        return slice(first, int(kind.first[-1]) + length)
    columns: Ints = (kind.first[:, None] + np.arange(length)).reshape(-1)
    return columns
