"""Proof of exact cover: every destination atom of a component is written once, from its own source atom. No planning.

The proof does not trust how rows were folded. It enumerates the destination's atoms from the declarations,
computes for each where it lies on both sides, and checks that exactly one row carries it there:

1. rows, ordered by destination place, do not overlap;
2. each atom lies inside one row, of the elected source rank, at the source place that the source declares;
3. the rows' bytes sum to the atoms' bytes, so that no row writes anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.errors import PlanError
from kvplan.planner.rows import concatenate
from kvplan.planner.table import locate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvplan.planner.meeting import Meeting
    from kvplan.planner.rows import Rows
    from kvplan.planner.table import AxisTable, Ints

CHUNK_ATOMS = 1 << 18
"""Atoms checked at once: bounds the proof's memory, about 100 bytes an atom."""

_SLOT_SHIFT = 40
"""Slots are put above the offsets in one sortable key; block strides stay far below 2^40 bytes."""


class _Side(NamedTuple):
    offset: Ints
    slot: Ints


def prove(meeting: Meeting, elected: Mapping[tuple[int, ...], int], rows: Mapping[int, Rows]) -> None:
    """Raise PlanError unless ``rows`` (per source rank) cover the meeting's atoms exactly once.

    ``elected`` names the source rank of each class of the meeting.
    """
    sources = list(rows)
    every = concatenate([rows[rank] for rank in sources])
    owner = np.repeat(np.array(sources, np.int64), [len(rows[rank].num_bytes) for rank in sources])
    key = _key(every.destination_slot, every.destination_offset)
    order = np.argsort(key, kind="stable")
    key, owner = key[order], owner[order]
    every = type(every)(*(column[order] for column in every))
    if (key[1:] < (key + every.num_bytes)[:-1]).any():
        raise PlanError("two rows of the plan write the same destination bytes")
    num_atoms = 0
    for coordinates, labels in _chunks(meeting):
        num_atoms += _check_chunk(meeting, elected, coordinates, labels, key, owner, every)
    if num_atoms * meeting.atom_bytes != int(every.num_bytes.sum()):
        raise PlanError(f"the plan writes {int(every.num_bytes.sum())} bytes for {num_atoms} atoms")


def _key(slot: Ints, offset: Ints) -> Ints:
    return (slot << _SLOT_SHIFT) + offset


def _chunks(meeting: Meeting) -> Iterator[tuple[list[Ints], list[Ints]]]:
    """Yield per-axis coordinates and their labels, the longest axis cut so that a chunk stays small."""
    whole = [_coordinates(axis.start, axis.stop, axis.label) for axis in meeting.axes]
    if not whole:
        yield [], []
        return
    longest = max(range(len(whole)), key=lambda i: len(whole[i][0]))
    rest = max(1, int(np.prod([len(x) for i, (x, _) in enumerate(whole) if i != longest])))
    step = max(1, CHUNK_ATOMS // rest)
    for first in range(0, len(whole[longest][0]), step):
        part = [(x[first : first + step], y[first : first + step]) if i == longest else (x, y)
                for i, (x, y) in enumerate(whole)]  # fmt: skip
        yield [x for x, _ in part], [y for _, y in part]


def _coordinates(start: Ints, stop: Ints, label: Ints) -> tuple[Ints, Ints]:
    count = stop - start
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(start, count) + within, np.repeat(label, count)


def _check_chunk(
    meeting: Meeting,
    elected: Mapping[tuple[int, ...], int],
    coordinates: list[Ints],
    labels: list[Ints],
    key: Ints,
    owner: Ints,
    rows: Rows,
) -> int:
    destination = _place(meeting.destination_tables, coordinates)
    atom_key = _key(destination.slot, destination.offset)
    index = np.searchsorted(key, atom_key, side="right") - 1
    inside = (index >= 0) & (atom_key + meeting.atom_bytes <= key[index] + rows.num_bytes[index])
    if not inside.all():
        _fail(meeting, coordinates, ~inside, "is not written")
    wanted = _elected(labels, elected, [len(x) for x in coordinates])
    wrong = owner[index] != wanted
    for rank in np.unique(wanted).tolist():
        source = _place(meeting.source_tables[rank], coordinates)
        place = rows.source_offset[index] + (atom_key - key[index])
        moved = (place != source.offset) | (rows.source_slot[index] != source.slot)
        wrong |= (wanted == rank) & moved
    if wrong.any():
        _fail(meeting, coordinates, wrong, "is written from the wrong place")
    return len(atom_key)


def _place(tables: tuple[AxisTable, ...], coordinates: list[Ints]) -> _Side:
    offset = slot = np.zeros(1, np.int64)
    for table, x in zip(tables, coordinates, strict=True):
        i = locate(table, x)[0]
        here = table.offset[i] + (x - table.start[i]) * table.step[i]
        offset = (offset[:, None] + here[None, :]).reshape(-1)
        slot = (slot[:, None] + table.slot[i][None, :]).reshape(-1)
    return _Side(offset, slot)


def _elected(labels: list[Ints], elected: Mapping[tuple[int, ...], int], shape: list[int]) -> Ints:
    if not labels:
        return np.array([next(iter(elected.values()))], np.int64)
    size = tuple(max(k[i] for k in elected) + 1 for i in range(len(labels)))
    wanted = np.zeros(size, np.int64)
    for chosen, rank in elected.items():
        wanted[chosen] = rank
    picked: Ints = wanted[np.ix_(*labels)].reshape(int(np.prod(shape)))
    return picked


def _fail(meeting: Meeting, coordinates: list[Ints], bad: NDArray[np.bool_], what: str) -> None:
    shape = [len(x) for x in coordinates]
    place = np.unravel_index(int(np.flatnonzero(bad)[0]), shape) if shape else ()
    where = ", ".join(f"{name} {int(x[i])}" for name, x, i in zip(meeting.names, coordinates, place, strict=True))
    raise PlanError(f"the plan is wrong: {where or 'the only atom'} {what}")
