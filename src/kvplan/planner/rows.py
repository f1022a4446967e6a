"""Rows: runs inside the blocks of one period, as arrays; how a product of pieces becomes rows. No addresses.

1. A cell is one piece per axis: a loop nest of (turns, source step, destination step).
2. Fold: an axis whose two steps both equal the bytes so far is swallowed by the run.
3. What is left is expanded; cells with equal loop nests are expanded together, by one broadcast.
4. Coalesce: rows that continue each other on both sides become one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.planner.table import Pieces, clip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.planner.table import Ints


class Rows(NamedTuple):
    """Runs of one period, int64 arrays of one length: which bytes of which block go where."""

    source_slot: Ints
    destination_slot: Ints
    source_offset: Ints
    destination_offset: Ints
    num_bytes: Ints


class Cells(NamedTuple):
    """A product of pieces: every combination of one piece per axis is a cell."""

    names: tuple[str, ...]
    """Axis names."""
    axes: tuple[Pieces, ...]
    """One entry per name."""
    atom_bytes: int

    def clipped(self, name: str, stop: int) -> Cells:
        """Return the cells with one axis cut at ``stop``."""
        axes = tuple(clip(p, stop) if n == name else p for n, p in zip(self.names, self.axes, strict=True))
        return self._replace(axes=axes)


class _Loop(NamedTuple):
    """Pieces of one axis that share (turns, source step, destination step)."""

    turns: int
    source_step: int
    destination_step: int
    pieces: Pieces


def rows_of(cells: Cells) -> Rows:
    """Return the folded, coalesced rows of a product of pieces."""
    if any(len(p.start) == 0 for p in cells.axes):
        return empty_rows()
    per_axis = [_loops(p) for p in cells.axes]
    parts = [_expand(nest, cells.atom_bytes) for nest in itertools.product(*per_axis)]
    return coalesce(concatenate(parts))


def empty_rows() -> Rows:
    """Return no rows."""
    return Rows(*(np.empty(0, np.int64) for _ in Rows._fields))


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Return all rows of several parts, in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return empty_rows()
    return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def shifted(rows: Rows, source_bytes: int, destination_bytes: int) -> Rows:
    """Return the rows with a base offset added on each side."""
    if source_bytes == 0 and destination_bytes == 0:
        return rows
    return rows._replace(
        source_offset=rows.source_offset + source_bytes, destination_offset=rows.destination_offset + destination_bytes
    )


def coalesce(rows: Rows) -> Rows:
    """Return the rows ordered by place, with those joined that continue each other on both sides.

    >>> zero = np.array([0, 0])
    >>> coalesce(Rows(zero, zero, np.array([64, 0]), np.array([96, 32]), np.array([64, 64]))).num_bytes
    array([128])
    """
    if len(rows.num_bytes) < 2:
        return rows
    order = np.lexsort((rows.source_offset, rows.destination_slot, rows.source_slot))
    rows = Rows(*(column[order] for column in rows))
    first = run_starts(
        (rows.source_slot[1:] == rows.source_slot[:-1])
        & (rows.destination_slot[1:] == rows.destination_slot[:-1])
        & (rows.source_offset[1:] == rows.source_offset[:-1] + rows.num_bytes[:-1])
        & (rows.destination_offset[1:] == rows.destination_offset[:-1] + rows.num_bytes[:-1])
    )
    total = np.add.reduceat(rows.num_bytes, first)
    return Rows(*(column[first] for column in rows))._replace(num_bytes=total)


def run_starts(continues: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Ints:
    """Return the indices at which a run starts, given for each neighbour pair whether it continues."""
    return np.flatnonzero(np.concatenate([[True], ~continues]))


def _loops(p: Pieces) -> list[_Loop]:
    shape = np.stack([p.stop - p.start, p.source_step, p.destination_step], axis=1)
    if len(shape) == 1 or (shape == shape[0]).all():
        return [_loop(shape[0], p)]
    kinds, which = np.unique(shape, axis=0, return_inverse=True)
    which = which.reshape(-1)
    return [_loop(kind, Pieces(*(c[which == i] for c in p))) for i, kind in enumerate(kinds)]


def _loop(shape: Ints, p: Pieces) -> _Loop:
    turns, source_step, destination_step = shape.tolist()
    return _Loop(turns, source_step, destination_step, p)


def _expand(nest: tuple[_Loop, ...], atom_bytes: int) -> Rows:
    num_bytes, left = _fold(nest, atom_bytes)
    zero = np.zeros(1, np.int64)
    columns = [zero, zero, zero, zero]
    for loop in nest:
        p = loop.pieces
        for i, add in enumerate((p.source_slot, p.destination_slot, p.source_offset, p.destination_offset)):
            columns[i] = (columns[i][:, None] + add[None, :]).reshape(-1)
    for loop in left:
        turn = np.arange(loop.turns, dtype=np.int64)
        for i, step in enumerate((0, 0, loop.source_step, loop.destination_step)):
            columns[i] = (columns[i][:, None] + (turn * step)[None, :]).reshape(-1)
    return Rows(*(*columns, np.full(len(columns[0]), num_bytes, np.int64)))


def _fold(nest: tuple[_Loop, ...], atom_bytes: int) -> tuple[int, list[_Loop]]:
    """Return the bytes of one run and the loops that do not fold into it."""
    left = [loop for loop in nest if loop.turns > 1]
    num_bytes = atom_bytes
    while True:
        inner = next((x for x in left if x.source_step == num_bytes and x.destination_step == num_bytes), None)
        if inner is None:
            return num_bytes, left
        num_bytes *= inner.turns
        left.remove(inner)
