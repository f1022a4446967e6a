"""Axes as arrays: the numeric form of spans, over one period. No ranks, no election.

1. ``axis_table`` turns the spans of an axis into five parallel arrays, repeated over the blocks of a period.
2. ``locate`` finds for each coordinate the span that holds it.
3. ``pieces`` reads two tables at given intervals: on each one both sides are affine.
4. ``merge`` joins neighbouring pieces that continue each other on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.planner.span import Axis

    Ints = NDArray[np.int64]


class AxisTable(NamedTuple):
    """Spans of one axis in ascending order, int64 arrays of one length."""

    start: Ints
    stop: Ints
    offset: Ints
    step: Ints
    slot: Ints


class Pieces(NamedTuple):
    """Intervals of one axis on which both sides are affine, int64 arrays of one length."""

    start: Ints
    stop: Ints
    source_offset: Ints
    source_step: Ints
    source_slot: Ints
    destination_offset: Ints
    destination_step: Ints
    destination_slot: Ints


def axis_table(axis: Axis, *, repeats: int = 1, tokens: int = 0) -> AxisTable:
    """Return the spans of an axis, repeated over ``repeats`` blocks of ``tokens`` coordinates each."""
    rows = [(s.start, s.stop, s.offset_bytes, s.stride_bytes, s.slot) for s in axis.spans]
    base = np.array(rows, dtype=np.int64).reshape(1, len(rows), 5)
    if repeats == 1:
        return AxisTable(*base[0].T)
    block = np.arange(repeats, dtype=np.int64)[:, None]
    shift = np.concatenate([block * tokens, block * tokens, block * 0, block * 0, block], axis=1)
    return AxisTable(*(base + shift[:, None, :]).reshape(-1, 5).T)


def boundaries(tables: list[AxisTable]) -> Ints:
    """Return every coordinate at which some table's span starts or stops, ascending and distinct."""
    return np.unique(np.concatenate([edge for table in tables for edge in (table.start, table.stop)]))


def locate(table: AxisTable, coordinate: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the index of the span at or before each coordinate, and whether that span holds it."""
    index = np.searchsorted(table.start, coordinate, side="right") - 1
    held = (index >= 0) & (coordinate < table.stop[index])
    return index, held


def pieces(source: AxisTable, destination: AxisTable, start: Ints, stop: Ints) -> Pieces:
    """Return both sides' affine pieces on intervals that both sides hold (the caller has made sure)."""
    s, _ = locate(source, start)
    d, _ = locate(destination, start)
    return merge(
        Pieces(
            start,
            stop,
            source.offset[s] + (start - source.start[s]) * source.step[s],
            source.step[s],
            source.slot[s],
            destination.offset[d] + (start - destination.start[d]) * destination.step[d],
            destination.step[d],
            destination.slot[d],
        )
    )


def merge(p: Pieces) -> Pieces:
    """Return the pieces with neighbours joined where one continues the other on both sides.

    >>> one = np.array([0, 2]), np.array([2, 4])
    >>> zero = np.array([0, 0])
    >>> step = np.array([8, 8])
    >>> merge(Pieces(*one, np.array([0, 16]), step, zero, np.array([4, 20]), step, zero)).stop
    array([4])
    """
    if len(p.start) < 2:
        return p
    n = p.stop[:-1] - p.start[:-1]
    joins = p.start[1:] == p.stop[:-1]
    for offset, step, slot in (
        (p.source_offset, p.source_step, p.source_slot),
        (p.destination_offset, p.destination_step, p.destination_slot),
    ):
        joins &= (slot[1:] == slot[:-1]) & (step[1:] == step[:-1]) & (offset[1:] == offset[:-1] + n * step[:-1])
    if not joins.any():
        return p
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    last = np.concatenate([first[1:] - 1, [len(joins)]])
    head = [column[first] for column in p]
    head[1] = p.stop[last]
    return Pieces(*head)


def clip(p: Pieces, stop: int) -> Pieces:
    """Return the pieces cut at a coordinate: nothing at or beyond ``stop`` remains."""
    kept = p.start < stop
    columns = [column[kept] for column in p]
    columns[1] = np.minimum(columns[1], stop)
    return Pieces(*columns)
