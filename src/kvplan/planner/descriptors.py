"""Binding: block tables and a plan become descriptors, by one broadcast and one mask. Nothing is planned here.

1. Lay each side's block ids out over whole periods; what a table does not name is a hole.
2. Per period and row: source id, destination id. A row with a hole on either side moves nothing.
3. Address = id * stride + offset; coalesce across consecutive ids; then add every region's base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.errors import BindError
from kvplan.planner.rows import Rows, run_starts
from kvplan.planner.tables import HOLE, BlockTable, check_cover, laid_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvplan.planner.plan import PairPlan, PlanPart
    from kvplan.planner.table import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Runs bound to blocks: what a transport takes. Three uint64 arrays of one length, absolute addresses, bytes.

    Where all runs are equally long, ``num_bytes`` may be one number seen n times (stride 0, read-only).
    """

    source_address: NDArray[np.uint64]
    destination_address: NDArray[np.uint64]
    num_bytes: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def total_bytes(self) -> int:
        """Sum of all runs' bytes."""
        return int(self.num_bytes.sum())


class _Bound(NamedTuple):
    """Runs relative to the regions' bases."""

    source: Ints
    destination: Ints
    num_bytes: Ints


def bind(
    plan: PairPlan,
    source: Sequence[BlockTable],
    destination: Sequence[BlockTable],
    *,
    num_tokens: int,
    whole_blocks: bool,
    require_cover: bool = True,
) -> Descriptors:
    """Return the descriptors of one request between one pair of ranks.

    ``source`` and ``destination`` hold one table per KV cache group of that side. Tokens before the destination's
    ``first_token`` and from ``num_tokens`` on are not moved; with ``whole_blocks`` the last block moves whole, which
    costs fewer runs. ``require_cover`` refuses a destination block whose needed tokens have no source block.
    Raises BindError when ids leave their region, tables are misaligned, or cover lacks.
    """
    bound = []
    for part in plan.parts:
        s, d = _table(source, part.source_group, "source"), _table(destination, part.destination_group, "destination")
        _check_ids(s, part.source_blocks, "source", part)
        _check_ids(d, part.destination_blocks, "destination", part)
        if part.period_tokens is None:
            bound.append((part, _bind_state(part, s, d, require_cover=require_cover)))
        else:
            if require_cover:
                check_cover(part, s, d, num_tokens)
            bound.append((part, _bind_tokens(part, s, d, num_tokens, whole_blocks=whole_blocks)))
    return _placed(bound)


def _table(tables: Sequence[BlockTable], group: int, side: str) -> BlockTable:
    if group >= len(tables):
        raise BindError(f"{side} has {len(tables)} block tables, but the plan needs group {group}")
    return tables[group]


def _check_ids(table: BlockTable, num_blocks: int, side: str, part: PlanPart) -> None:
    ids = table.ids()
    if len(ids) and (int(ids.max()) >= num_blocks or int(ids.min()) < HOLE):
        bad = int(ids[(ids >= num_blocks) | (ids < HOLE)][0])
        raise BindError(f"{side} block id {bad} is not in [0, {num_blocks}) (layer {part.layers[0]!r})")


def _bind_state(part: PlanPart, source: BlockTable, destination: BlockTable, *, require_cover: bool) -> _Bound:
    s, d = source.ids(), destination.ids()
    if len(s) != len(d):
        raise BindError(f"state blocks are paired in order, but the source names {len(s)} and the destination {len(d)}")
    lacking = np.flatnonzero((d != HOLE) & (s == HOLE))
    if require_cover and len(lacking):
        raise BindError(
            f"group {part.destination_group}: the destination needs state block {int(lacking[0])}, "
            "but the source has no block for it"
        )
    return _coalesced(_addressed(part, part.rows, s[:, None], d[:, None]))


def _bind_tokens(part: PlanPart, source: BlockTable, destination: BlockTable, num_tokens: int, *, whole_blocks: bool
) -> _Bound:  # fmt: skip
    period = part.period_tokens or 1
    s = laid_out(source, part.source_tokens or 1, period, num_tokens)
    d = laid_out(destination, part.destination_tokens or 1, period, num_tokens)
    full, rest = divmod(num_tokens, period)
    if whole_blocks or rest == 0:
        return _coalesced(_addressed(part, part.rows, s, d))
    tail = part.rows_until(rest)
    head = _addressed(part, part.rows, s[:full], d[:full])
    last = _addressed(part, tail, s[full:], d[full:])
    return _coalesced(_Bound(*(np.concatenate(columns) for columns in zip(head, last, strict=True))))


def _addressed(part: PlanPart, rows: Rows, source: Ints, destination: Ints) -> _Bound:
    """Return the runs of all periods: ids are (periods, slots), rows name slots."""
    s, d = source[:, rows.source_slot], destination[:, rows.destination_slot]
    moved = (s >= 0) & (d >= 0)
    s_stride = part.source_regions[0].block_stride_bytes
    d_stride = part.destination_regions[0].block_stride_bytes
    s_place, d_place = s * s_stride + rows.source_offset, d * d_stride + rows.destination_offset
    num_bytes = np.broadcast_to(rows.num_bytes, s.shape)
    if moved.all():
        return _Bound(s_place.reshape(-1), d_place.reshape(-1), num_bytes.reshape(-1))
    return _Bound(s_place[moved], d_place[moved], num_bytes[moved])


def _coalesced(runs: _Bound) -> _Bound:
    """Return the runs in source order, neighbours joined where both sides continue."""
    if len(runs.num_bytes) < 2:
        return runs
    if not (runs.source[1:] > runs.source[:-1]).all():
        order = np.argsort(runs.source)
        runs = _Bound(*(column[order] for column in runs))
    joins = (runs.source[1:] == runs.source[:-1] + runs.num_bytes[:-1]) & (
        runs.destination[1:] == runs.destination[:-1] + runs.num_bytes[:-1]
    )
    if not joins.any():
        return runs
    first = run_starts(joins)
    return _Bound(runs.source[first], runs.destination[first], np.add.reduceat(runs.num_bytes, first))


def _placed(bound: list[tuple[PlanPart, _Bound]]) -> Descriptors:
    """Return absolute descriptors: every region pair of a part gets the part's runs."""
    total = sum(part.num_regions * len(runs.num_bytes) for part, runs in bound)
    equal = _one_length(bound)
    # One allocation: allocators keep one large piece for the next time, and give several back.
    columns = np.empty((2 if equal else 3, total), np.int64)
    at = 0
    for part, runs in bound:
        shape = (part.num_regions, len(runs.num_bytes))
        span = slice(at, at + part.num_regions * len(runs.num_bytes))
        for column, base, place in zip(
            columns, (part.source_base, part.destination_base), (runs.source, runs.destination), strict=False
        ):
            np.add(base[:, None], place, out=column[span].reshape(shape))
        if not equal:
            columns[2][span].reshape(shape)[:] = runs.num_bytes
        at = span.stop
    s, d = columns[0].view(np.uint64), columns[1].view(np.uint64)
    return Descriptors(s, d, np.broadcast_to(np.uint64(equal), total) if equal else columns[2].view(np.uint64))


def _one_length(bound: list[tuple[PlanPart, _Bound]]) -> int:
    """Return the length that all runs have, or 0."""
    lengths = {int(n) for _, runs in bound if len(runs.num_bytes) for n in (runs.num_bytes.min(), runs.num_bytes.max())}
    return lengths.pop() if len(lengths) == 1 else 0
