"""Atoms in order: where each coordinate of a request lies on one side, in an order that does not depend on layouts.

A plan's cells name the coordinates that one rank gives another. Both sides can list them in the same order, whatever
their block sizes, strides and parallel sizes are; what is read in this order on both sides must be equal. This is what
digests are made of.

1. Per component: the product of its axes' coordinates, axes by name, the token axis last.
2. A strand is one combination of the other axes: its atoms run along the tokens of the request.
3. Address = region base + block id * stride + base offset + sum of the axes' offsets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvplan.planner.layout import TOKEN
from kvplan.planner.tables import BlockTable, laid_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvplan.planner.plan import PairPlan, PlacedCells, PlanPart
    from kvplan.planner.table import Ints, Pieces

Side = Literal["source", "destination"]


class _Along(NamedTuple):
    """One axis, coordinate by coordinate."""

    coordinate: Ints
    offset: Ints
    slot: Ints


@dataclass(frozen=True, slots=True, eq=False)
class AtomTable:
    """Addresses of one component's atoms on one side."""

    layer: str
    component: str
    along: str
    """What a strand runs along: ``token``, or ``block`` for state."""
    names: tuple[str, ...]
    """Axes of a strand, by name; the token axis is not among them."""
    coordinates: tuple[Ints, ...]
    """Per axis of a strand, its coordinates; strands are their product, the last axis running fastest."""
    tokens: Ints
    """Token of each atom of a strand; for state the index of its block. One array for all layers of a part."""
    origin: Ints
    """(strands,), absolute: where each strand would begin at place 0."""
    place: Ints
    """(tokens,), bytes from a strand's origin to its atom of each token: the same for every strand."""
    atom_bytes: int

    @property
    def address(self) -> Ints:
        """Return the absolute address of every atom, (strands, tokens)."""
        return self.origin[:, None] + self.place[None, :]

    def strand(self, index: int) -> dict[str, int]:
        """Return the coordinates of a strand."""
        place = np.unravel_index(index, [len(x) for x in self.coordinates]) if self.names else ()
        return {n: int(x[i]) for n, x, i in zip(self.names, self.coordinates, place, strict=True)}


def atoms(
    plan: PairPlan,
    side: Side,
    source: Sequence[BlockTable],
    destination: Sequence[BlockTable],
    *,
    num_tokens: int,
    first_token: int = 0,
) -> Iterator[AtomTable]:
    """Yield every component that the plan moves for a request, as it lies on one side.

    Both sides yield the same components, strands and tokens: those that have a block on both sides. Only tokens in
    [``first_token``, ``num_tokens``) are listed, so that a long request can be walked in windows; state, which has
    no tokens, belongs to the window that begins at 0.
    """
    tokens = (first_token, num_tokens)
    for part in plan.parts:
        tables = (source[part.source_group], destination[part.destination_group])
        if part.period_tokens is None and first_token > 0:
            continue
        blocks = _state_blocks(tables, side) if part.period_tokens is None else _blocks(part, tables, tokens, side)
        regions = part.source_regions if side == "source" else part.destination_regions
        stride = regions[0].block_stride_bytes
        stamps = [_component(placed, stride, blocks, side, tokens) for placed in part.placed]
        for region, names in zip(regions, part.names, strict=True):
            for stamp, (layer, component) in zip(stamps, names, strict=True):
                yield replace(stamp, layer=layer, component=component, origin=stamp.origin + region.base)


class _Blocks(NamedTuple):
    """Block ids of both sides, (periods, slots) each, from the period that holds the first token that is listed."""

    own: Ints
    other: Ints
    first_period: int
    period_tokens: int | None


def _state_blocks(tables: tuple[BlockTable, BlockTable], side: Side) -> _Blocks:
    own, other = tables if side == "source" else tables[::-1]
    return _Blocks(own.ids()[:, None], other.ids()[:, None], 0, None)


def _blocks(part: PlanPart, tables: tuple[BlockTable, BlockTable], tokens: tuple[int, int], side: Side) -> _Blocks:
    period = part.period_tokens or 1
    sizes = (part.source_tokens or 1, part.destination_tokens or 1)
    first = tokens[0] // period
    ids = [laid_out(t, n, period, tokens[1])[first:] for t, n in zip(tables, sizes, strict=True)]
    own, other = ids if side == "source" else ids[::-1]
    return _Blocks(own, other, first, period)


def _component(placed: PlacedCells, stride: int, blocks: _Blocks, side: Side, tokens: tuple[int, int]) -> AtomTable:
    """Return the table of a component without its names, in a region that begins at address 0."""
    cells = placed.cells
    base = placed.source_bytes if side == "source" else placed.destination_bytes
    along = {name: _along(p, side) for name, p in zip(cells.names, cells.axes, strict=True)}
    other = {name: _along(p, _opposite(side)) for name, p in zip(cells.names, cells.axes, strict=True)}
    names = tuple(name for name in cells.names if name != TOKEN)
    strand = np.zeros(1, np.int64)
    for name in names:
        strand = (strand[:, None] + along[name].offset[None, :]).reshape(-1)
    zero = _Along(*(np.zeros(1, np.int64) for _ in _Along._fields))
    token, place = _tokens(along.get(TOKEN, zero), other.get(TOKEN, zero).slot, blocks, stride, tokens)
    return AtomTable(
        "",
        "",
        "block" if blocks.period_tokens is None else TOKEN,
        names,
        tuple(along[name].coordinate for name in names),
        token,
        base + strand,
        place,
        cells.atom_bytes,
    )


def _opposite(side: Side) -> Side:
    return "destination" if side == "source" else "source"


def _along(p: Pieces, side: Side) -> _Along:
    count = p.stop - p.start
    index = np.repeat(np.arange(len(count)), count)
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    if side == "source":
        offset, step, slot = p.source_offset, p.source_step, p.source_slot
    else:
        offset, step, slot = p.destination_offset, p.destination_step, p.destination_slot
    return _Along(p.start[index] + within, offset[index] + within * step[index], slot[index])


def _tokens(
    token: _Along, other_slot: Ints, blocks: _Blocks, stride: int, tokens: tuple[int, int]
) -> tuple[Ints, Ints]:
    """Return (token, place relative to the region's base) of every token that both sides hold, ascending."""
    own, other = blocks.own[:, token.slot], blocks.other[:, other_slot]
    period = np.arange(blocks.first_period, blocks.first_period + len(own))
    position = period[:, None] * (blocks.period_tokens or 1) + token.coordinate
    held = (own >= 0) & (other >= 0)
    if blocks.period_tokens is not None:
        held &= (position >= tokens[0]) & (position < tokens[1])
    return position[held], (own * stride + token.offset)[held]
