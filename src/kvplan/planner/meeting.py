"""Meetings: where one destination layout and all source layouts of a component hold the same coordinates.

1. Per axis, collect every side's breakpoints; on each elementary interval every layout is affine or absent.
2. Label each interval that the destination holds by the set of source ranks that hold it (a bit mask).
3. A class is one label per axis; the ranks that hold a class hold every axis of it: the AND of the masks.
4. A class that no rank holds is an UncoveredError with its coordinates.

Nothing is elected here: a meeting is the map, ``election`` chooses on it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.errors import FormatMismatchError, UncoveredError
from kvplan.planner.layout import TOKEN, BlockLayout
from kvplan.planner.refine import common_atoms
from kvplan.planner.rows import Cells
from kvplan.planner.table import AxisTable, axis_table, boundaries, locate, pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvplan.planner.table import Ints

    Tables = tuple[AxisTable, ...]


MAX_TOKEN_ROWS = 1 << 18
"""Intervals of one token axis until two block sizes repeat: 4,096 blocks of 64 kernel blocks. More would take seconds
to plan, and a peer that names absurd sizes could keep a thread busy for hours."""


class Labelled(NamedTuple):
    """One axis of the destination, cut into elementary intervals."""

    start: Ints
    stop: Ints
    label: Ints
    """Index into ``masks``, one per interval."""
    masks: tuple[int, ...]
    """Bit mask of source ranks that hold the intervals of that label."""


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """The map of one component: destination classes and who holds them."""

    names: tuple[str, ...]
    axes: tuple[Labelled, ...]
    atom_bytes: int
    source_tokens: int | None
    destination_tokens: int | None
    period_tokens: int | None
    destination_tables: Tables
    source_tables: Mapping[int, Tables]
    """Per source rank."""
    classes: tuple[tuple[tuple[int, ...], int], ...]
    """(one label per axis, mask of the ranks that hold the class)."""

    def cells(self, source_rank: int, chosen: list[tuple[int, ...]]) -> list[Cells]:
        """Return the cells of the chosen classes as that source rank and the destination hold them."""
        product = [sorted(set(labels)) for labels in zip(*chosen, strict=True)]
        if math.prod(map(len, product)) == len(chosen):
            return [self._cells(source_rank, product)]
        return [self._cells(source_rank, [[label] for label in labels]) for labels in chosen]

    def _cells(self, source_rank: int, labels: list[list[int]]) -> Cells:
        axes = []
        for axis, wanted, here, there in zip(
            self.axes, labels, self.source_tables[source_rank], self.destination_tables, strict=True
        ):
            kept = np.isin(axis.label, wanted) if len(wanted) < len(axis.masks) else slice(None)
            axes.append(pieces(here, there, axis.start[kept], axis.stop[kept]))
        return Cells(self.names, tuple(axes), self.atom_bytes)


def period_tokens(source_tokens: int, destination_tokens: int) -> int:
    """Return the tokens after which the pattern of two block sizes repeats.

    >>> period_tokens(48, 32)
    96
    """
    return math.lcm(source_tokens, destination_tokens)


def meet(destination: BlockLayout, sources: Mapping[int, BlockLayout]) -> Meeting:
    """Return the map of one component between a destination rank and all source ranks that declare it.

    Raises UncoveredError or FormatMismatchError without layer and component; the caller adds them.
    """
    refined = common_atoms([destination, *sources.values()])
    destination, sources = refined[0], dict(zip(sources, refined[1:], strict=True))
    d_tokens, s_tokens = _tokens(destination, sources)
    period = None if d_tokens is None or s_tokens is None else period_tokens(s_tokens, d_tokens)
    d_tables = _tables(destination, period)
    s_tables = {rank: _tables(block, period) for rank, block in sources.items()}
    names = tuple(axis.name for axis in destination.axes)
    axes = tuple(
        _label(name, d_tables[i], {rank: tables[i] for rank, tables in s_tables.items()})
        for i, name in enumerate(names)
    )
    classes = tuple(_classes(names, axes))
    atom = destination.atom_bytes
    return Meeting(names, axes, atom, s_tokens, d_tokens, period, d_tables, s_tables, classes)


def _tokens(destination: BlockLayout, sources: Mapping[int, BlockLayout]) -> tuple[int | None, int | None]:
    held = {block.tokens_per_block for block in sources.values()}
    if len(held) != 1 or (None in held) != (destination.tokens_per_block is None):
        raise FormatMismatchError(
            f"tokens_per_block is {sorted(map(str, held))} at the source, {destination.tokens_per_block} at the "
            "destination; all source ranks must agree, and state does not meet token blocks"
        )
    return destination.tokens_per_block, held.pop()


def _tables(block: BlockLayout, period: int | None) -> Tables:
    tokens = block.tokens_per_block
    repeats = 1 if period is None or tokens is None else period // tokens
    num_rows = repeats * sum(len(axis.spans) for axis in block.axes if axis.name == TOKEN)
    if num_rows > MAX_TOKEN_ROWS:
        raise FormatMismatchError(
            f"blocks of {tokens} tokens meet the other side's blocks anew only after {repeats} of them: {num_rows} "
            f"intervals to plan, the limit is {MAX_TOKEN_ROWS}; choose block sizes of which one divides the other",
            source=f"{tokens} tokens per block", destination=f"a period of {period} tokens",
        )  # fmt: skip
    return tuple(
        axis_table(axis, repeats=repeats, tokens=tokens or 0) if axis.name == TOKEN else axis_table(axis)
        for axis in block.axes
    )


def _label(name: str, destination: AxisTable, sources: Mapping[int, AxisTable]) -> Labelled:
    edges = boundaries([destination, *sources.values()])
    start, stop = edges[:-1], edges[1:]
    wanted = locate(destination, start)[1]
    start, stop = start[wanted], stop[wanted]
    held = np.stack([locate(table, start)[1] for table in sources.values()], axis=1)
    lacking = np.flatnonzero(~held.any(axis=1))
    if len(lacking):
        interval = (int(start[lacking[0]]), int(stop[lacking[0]]))
        raise UncoveredError(f"axis {name!r} [{interval[0]}, {interval[1]}) is held by no source rank",
                             axis=name, interval=interval)  # fmt: skip
    masks, label = _masks(held, list(sources))
    return Labelled(start, stop, label, masks)


def _masks(held: NDArray[np.bool_], ranks: list[int]) -> tuple[tuple[int, ...], Ints]:
    if (held == held[0]).all():
        distinct, label = held[:1], np.zeros(len(held), np.int64)
    else:
        distinct, label = np.unique(held, axis=0, return_inverse=True)
        label = label.reshape(-1)
    masks = tuple(sum(1 << rank for rank, has in zip(ranks, row, strict=True) if has) for row in distinct.tolist())
    return masks, label


def _classes(names: tuple[str, ...], axes: tuple[Labelled, ...]) -> list[tuple[tuple[int, ...], int]]:
    found = []
    for labels in itertools.product(*(range(len(axis.masks)) for axis in axes)):
        mask = -1
        for axis, label in zip(axes, labels, strict=True):
            mask &= axis.masks[label]
        if mask == 0:
            where = ", ".join(_where(name, axis, label) for name, axis, label in zip(names, axes, labels, strict=True))
            raise UncoveredError(f"no single source rank holds {where}")
        found.append((labels, mask))
    return found


def _where(name: str, axis: Labelled, label: int) -> str:
    i = int(np.flatnonzero(axis.label == label)[0])
    return f"{name} [{int(axis.start[i])}, {int(axis.stop[i])})"
