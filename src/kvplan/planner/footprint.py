"""Footprints: the bytes that declarations cover inside one block; proof that none alias. No pairs of sides.

A footprint is the intersection of a layout with itself: its rows are the bytes it covers.
Components of one group and region must be disjoint, because one block id serves them all. Components of
different groups may share a region (hybrid memory): their block ids differ.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import AliasError, BoundsError
from kvplan.planner.rows import Cells, rows_of
from kvplan.planner.table import axis_table, pieces

if TYPE_CHECKING:
    from kvplan.planner.layout import BlockLayout, ComponentLayout, RankLayout
    from kvplan.planner.table import Ints


@lru_cache(maxsize=4096)
def footprint(block: BlockLayout) -> tuple[Ints, Ints]:
    """Return (offset_bytes, num_bytes) of the runs that one component covers in one block, ascending, base included."""
    axes = []
    for axis in block.axes:
        table = axis_table(axis)
        axes.append(pieces(table, table, table.start, table.stop))
    rows = rows_of(Cells(tuple(axis.name for axis in block.axes), tuple(axes), block.atom_bytes))
    order = np.argsort(rows.source_offset, kind="stable")
    return rows.source_offset[order] + block.base_bytes, rows.num_bytes[order]


def check_disjoint(rank: RankLayout) -> None:
    """Refuse a rank layout whose components overlap inside a block, or leave it."""
    members: dict[tuple[int, int], list[ComponentLayout]] = {}
    for item in rank.components:
        members.setdefault((item.region, item.group), []).append(item)
    proved: set[tuple[int, tuple[int, ...]]] = set()
    for (region, _), items in members.items():
        stride = rank.regions[region].block_stride_bytes
        key = (stride, tuple(id(item.block) for item in items))
        if key not in proved:
            _check_block(items, stride)
            proved.add(key)


def _check_block(items: list[ComponentLayout], stride: int) -> None:
    runs = [footprint(item.block) for item in items]
    for item, (offset, num_bytes) in zip(items, runs, strict=True):
        low, high = int(offset[0]), int((offset + num_bytes).max())
        if low < 0 or high > stride:
            raise BoundsError(
                f"layer {item.layer!r} component {item.component!r} covers bytes [{low}, {high}) of a block, "
                f"but the block stride is {stride}"
            )
    offset = np.concatenate([run[0] for run in runs])
    num_bytes = np.concatenate([run[1] for run in runs])
    owner = np.repeat(np.arange(len(items)), [len(run[0]) for run in runs])
    order = np.argsort(offset, kind="stable")
    offset, num_bytes, owner = offset[order], num_bytes[order], owner[order]
    bad = np.flatnonzero(offset[1:] < (offset + num_bytes)[:-1])
    if len(bad):
        first, second = (items[int(owner[int(bad[0]) + i])] for i in (0, 1))
        raise AliasError(
            f"layer {first.layer!r} component {first.component!r} and layer {second.layer!r} component "
            f"{second.component!r} both lie at byte {int(offset[int(bad[0]) + 1])} of a block"
        )
