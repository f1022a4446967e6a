"""Digests: what one rank gives another for a request, in numbers of coordinates and bytes alone. No messages.

A strand is one (layer, component, coordinates) with its atoms of all tokens that both sides hold, cut at every
``WINDOW_TOKENS``-th token so that a long request needs no more memory than a short one::

    key       = mix of layer, component, names, coordinates and tokens
    strand    = XXH3-64 of the atoms' bytes in token order, seeded by the key; summed over windows
    component = sum of its strands mod 2^64
    request   = sum of its components mod 2^64

Nothing in it depends on addresses, block ids, steps or the order of anything, and sums of shares are the sum of the
whole. So both sides get the same numbers whatever their layouts are, and a request has one number however it is
divided among ranks, as long as strands are whole and nobody gets a copy of what another gets. (Two things divide
strands: tokens that are spread over ranks, and single elements as atoms. Then the two sides of a pair still agree,
but their number is not that of a pair that divides otherwise.)

Strands of a few bytes, as convolution histories are, would cost a call each; they are mixed by NumPy, all at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvplan.errors import BindError, SessionError, UnsupportedError
from kvplan.planner import AtomTable, atoms
from kvplan.transport.gather import Columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvplan.planner import BlockTable, PairPlan
    from kvplan.planner.atom_table import Side

    Ints = NDArray[np.int64]
    Words = NDArray[np.uint64]
    Bytes = NDArray[np.uint8]

WINDOW_TOKENS = 4096
"""Part of the definition: both sides cut strands at its multiples."""
SHORT_BYTES = 64
"""Part of the definition: windows of strands up to here are mixed, longer ones go through XXH3."""
GATHER_BYTES = 1 << 20
"""Bytes that are gathered at a time: they should still be in the cache when they are hashed."""
MAX_PARTS = 256
"""Parts into which a question about strands or tokens divides what it is about."""
MASK = (1 << 64) - 1

_FACTORS = tuple(np.array([x], np.uint64) for x in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFTS = tuple(np.array([x], np.uint64) for x in (30, 27, 31))


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank gives another for one request, as it lies on one side."""

    plan: PairPlan
    side: Side
    source: Sequence[BlockTable]
    """By the source's group index."""
    destination: Sequence[BlockTable]
    num_tokens: int


class Scope(NamedTuple):
    """What digests are asked of: everything, the strands of a component, or the tokens of a strand."""

    layer: str = ""
    component: str = ""
    """Both empty: everything, by component."""
    strand: int | None = None
    """Index of a strand, in the order of coordinates; None: the strands themselves."""
    first: int = 0
    stop: int | None = None
    """Interval of strands, or of the strand's tokens, by index; None: all."""

    @property
    def is_everything(self) -> bool:
        """Whether components are asked for."""
        return not (self.layer or self.component)


class Digests(NamedTuple):
    """Answer to a scope."""

    components: dict[tuple[str, str], int]
    """By (layer, component), when everything is asked for."""
    parts: tuple[int, ...]
    """Otherwise: of the scope's interval, divided by ``bounds``."""
    total: int
    """How many components, strands or tokens there are."""


class Spot(NamedTuple):
    """One atom."""

    coordinates: dict[str, int]
    """With ``token`` or ``block`` last."""
    address: int
    num_bytes: int


def digests(share: Share, scope: Scope, *, is_wanted: Callable[[], bool] = lambda: True) -> Digests:
    """Return the digests of a scope, reading the share's bytes. Takes as long as that takes.

    Raises ``UnsupportedError`` for memory that the host cannot read, ``BindError`` for a scope that the share does
    not have, ``SessionError`` as soon as ``is_wanted`` says no.
    """
    check_host_memory(share)
    if scope.is_everything:
        found = _components(share, is_wanted)
        return Digests(found, (), len(found))
    if scope.strand is None:
        return _of_strands(share, scope, is_wanted)
    return _of_tokens(share, scope, is_wanted)


def whole(components: dict[tuple[str, str], int]) -> int:
    """Return the digest of all components together."""
    return sum(components.values()) & MASK


def bounds(first: int, stop: int) -> list[int]:
    """Return the edges of the parts into which an interval is divided: at most ``MAX_PARTS``, none empty.

    >>> bounds(10, 13), bounds(0, 512)[:3]
    ([10, 11, 12, 13], [0, 2, 4])
    """
    count = min(MAX_PARTS, stop - first)
    return [first + (stop - first) * i // count for i in range(count + 1)]


def spot(share: Share, layer: str, component: str, strand: int, index: int) -> Spot:
    """Return one atom of a strand: the ``index``-th token's."""
    tables = _tables(share, layer, component)
    ordinal, row = _strand(tables, strand)
    tokens, address = _along(tables[ordinal], row)
    table = tables[ordinal][0]
    coordinates = {**table.strand(row), table.along: int(tokens[index])}
    return Spot(coordinates, int(address[index]), table.atom_bytes)


def check_host_memory(share: Share) -> None:
    """Refuse a share that does not lie in host memory."""
    for part in share.plan.parts:
        for region in part.source_regions if share.side == "source" else part.destination_regions:
            if region.device != "cpu":
                raise UnsupportedError(f"the cache lies on {region.device}; digests are taken of host memory only")


def _components(share: Share, is_wanted: Callable[[], bool]) -> dict[tuple[str, str], int]:
    sums: dict[tuple[str, str], int] = {}
    for tables in _windows(share):
        columns: dict[int, Columns] = {}
        for table in tables:
            key = (table.layer, table.component)
            known = columns.get(id(table.place))
            if known is None:
                known = columns[id(table.place)] = Columns(table.place, table.atom_bytes)
            sums[key] = (sums.get(key, 0) + int(_strands(table, known, is_wanted).sum())) & MASK
    return sums


def _of_strands(share: Share, scope: Scope, is_wanted: Callable[[], bool]) -> Digests:
    tables = _tables(share, scope.layer, scope.component)
    each = [
        np.sum([_strands(t, Columns(t.place, t.atom_bytes), is_wanted) for t in windows], axis=0, dtype=np.uint64)
        for windows in tables
    ]
    ordered = np.concatenate(each)[_order([windows[0] for windows in tables])]
    edges = _edges(scope, len(ordered))
    return Digests({}, tuple(np.add.reduceat(ordered[: edges[-1]], edges[:-1]).tolist()), len(ordered))


def _of_tokens(share: Share, scope: Scope, is_wanted: Callable[[], bool]) -> Digests:
    tables = _tables(share, scope.layer, scope.component)
    ordinal, row = _strand(tables, scope.strand or 0)
    tokens, address = _along(tables[ordinal], row)
    edges = _edges(scope, len(tokens))
    parts = []
    for first, stop in pairwise(edges):
        _check_wanted(is_wanted)
        origin = address[first : first + 1]
        piece = Columns(address[first:stop] - origin, tables[ordinal][0].atom_bytes).gather(origin)
        parts.append(xxh3_64_intdigest(piece.data, xxh3_64_intdigest(_little(tokens[first:stop]))))
    return Digests({}, tuple(parts), len(tokens))


def _windows(share: Share) -> Iterator[list[AtomTable]]:
    for first in range(0, share.num_tokens, WINDOW_TOKENS):
        stop = min(first + WINDOW_TOKENS, share.num_tokens)
        tables = atoms(share.plan, share.side, share.source, share.destination, first_token=first, num_tokens=stop)
        yield list(tables)


def _tables(share: Share, layer: str, component: str) -> list[list[AtomTable]]:
    """Return a component's tables, each with all of its windows."""
    found: list[list[AtomTable]] = []
    for tables in _windows(share):
        own = [table for table in tables if (table.layer, table.component) == (layer, component)]
        found = found or [[] for _ in own]
        for windows, table in zip(found, own, strict=False):
            windows.append(table)
    if not found:
        raise BindError(f"nothing of layer {layer!r} component {component!r} moves between these ranks")
    return found


def _order(tables: list[AtomTable]) -> Ints:
    """Return the order of coordinates of the strands of several tables, one after the other."""
    grids = [np.meshgrid(*table.coordinates, indexing="ij") for table in tables]
    columns = [np.concatenate([grid[i].reshape(-1) for grid in grids]) for i in range(len(tables[0].names))]
    which = np.repeat(np.arange(len(tables)), [len(table.origin) for table in tables])
    order: Ints = np.lexsort((which, *reversed(columns)))
    return order


def _strand(tables: list[list[AtomTable]], strand: int) -> tuple[int, int]:
    """Return which table has a strand, and as which of its rows."""
    firsts = [windows[0] for windows in tables]
    order = _order(firsts)
    if not 0 <= strand < len(order):
        raise BindError(f"strand {strand} is not in [0, {len(order)})")
    row = int(order[strand])
    for ordinal, table in enumerate(firsts):
        if row < len(table.origin):
            return ordinal, row
        row -= len(table.origin)
    raise BindError(f"strand {strand} has no row")  # not reached: the rows add up to the order's length


def _along(windows: list[AtomTable], row: int) -> tuple[Ints, Ints]:
    """Return (tokens, addresses) of a whole strand."""
    tokens = np.concatenate([table.tokens for table in windows])
    return tokens, np.concatenate([table.origin[row] + table.place for table in windows])


def _edges(scope: Scope, total: int) -> list[int]:
    stop = total if scope.stop is None else scope.stop
    if not 0 <= scope.first < stop <= total:
        raise BindError(f"[{scope.first}, {stop}) is not in [0, {total}), or is empty")
    return bounds(scope.first, stop)


def _strands(table: AtomTable, columns: Columns, is_wanted: Callable[[], bool]) -> Words:
    """Return the digest of each strand of a window; of no tokens it is 0."""
    result = np.zeros(len(table.origin), np.uint64)
    num_bytes = len(table.place) * table.atom_bytes
    if not num_bytes:
        return result
    keys = _keys(table)
    step = max(1, GATHER_BYTES // num_bytes)
    for at in range(0, len(result), step):
        _check_wanted(is_wanted)
        own = slice(at, at + step)
        rows = columns.gather(table.origin[own])
        result[own] = _mixed_rows(rows, keys[own]) if num_bytes <= SHORT_BYTES else _hashed_rows(rows, keys[own])
    return result


def _keys(table: AtomTable) -> Words:
    """Return a seed for each strand."""
    named = "\0".join((table.layer, table.component, table.along, *table.names)).encode()
    keys = np.array([xxh3_64_intdigest(_little(table.tokens), xxh3_64_intdigest(named))], np.uint64)
    for coordinate in table.coordinates:
        keys = _mixed(keys[:, None] + _mixed(coordinate.view(np.uint64))[None, :]).reshape(-1)
    return keys


def _hashed_rows(rows: Bytes, keys: Words) -> list[int]:
    return [xxh3_64_intdigest(row, key) for row, key in zip(rows, keys.tolist(), strict=True)]


def _mixed_rows(rows: Bytes, keys: Words) -> Words:
    count = -(-rows.shape[1] // 8)
    padded = np.zeros((len(rows), 8 * count), np.uint8)
    padded[:, : rows.shape[1]] = rows
    for word in padded.view("<u8").T:
        keys = _mixed(keys ^ word)
    return keys


def _mixed(x: Words) -> Words:
    """Return the numbers well mixed, one to one (the finaliser of SplitMix64)."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


def _little(numbers: Ints) -> bytes:
    return numbers.astype("<i8", copy=False).tobytes()


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise SessionError("the digests are not wanted any more")
