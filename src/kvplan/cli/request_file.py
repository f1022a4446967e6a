"""Request files: block ids of one request, checked against two engines. No plan.

The form is DESIGN section 7's: logical block ids per group, entry i standing for the tokens from
``first_token + i * tokens_per_block``; -1 is a hole. A side that has fewer groups may be left out of the last entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplan.errors import DescriptionError
from kvplan.layouts.document import build, check_keys, load, mapping, sequence, shown
from kvplan.planner import HOLE, BlockTable
from kvplan.session.binding import MAX_TOKENS

if TYPE_CHECKING:
    from kvplan.cli.engine_file import Target
    from kvplan.planner import EngineLayout


@dataclass(frozen=True, slots=True)
class Request:
    """One request's tables, one per group of each side."""

    num_tokens: int
    source: tuple[BlockTable, ...]
    destination: tuple[BlockTable, ...]


@dataclass(frozen=True, slots=True)
class _Count:
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Table:
    block_ids: tuple[int, ...]
    first_token: int = 0


def read_request(path: str, source: Target, destination: Target) -> Request:
    """Return the request of a file. Raises DescriptionError with file, line and field."""
    document = load(Path(path))
    try:
        return _request(document.data, source, destination)
    except DescriptionError as error:
        raise document.located(error) from None


def _request(data: Any, source: Target, destination: Target) -> Request:
    fields = mapping(data, "")
    check_keys(fields, ["num_tokens", "groups"], "")
    count = build(_Count, {key: x for key, x in fields.items() if key == "num_tokens"}, "")
    _check_limit(count.num_tokens, "num_tokens")
    if "groups" not in fields:
        raise DescriptionError("groups must be given: one entry per KV cache group")
    entries = sequence(fields["groups"], "groups")
    sides = {"source": source, "destination": destination}
    tables = {side: _side(entries, side, target.layout) for side, target in sides.items()}
    needed = tuple(
        _needed(table, destination.window(group), count.num_tokens) for group, table in enumerate(tables["destination"])
    )
    return Request(count.num_tokens, tables["source"], needed)


def _side(entries: list[Any], side: str, layout: EngineLayout) -> tuple[BlockTable, ...]:
    tokens = {item.group: item.block.tokens_per_block for rank in layout.ranks for item in rank.components}
    num_groups = max(tokens, default=-1) + 1
    if len(entries) < num_groups:
        raise DescriptionError(f"{len(entries)} groups are given, the {side} has {num_groups}", field="groups")
    found = []
    for group, entry in enumerate(entries):
        field = f"groups.{group}"
        sides = mapping(entry, field)
        check_keys(sides, ["source", "destination"], field)
        if group >= num_groups:
            if sides.get(side) is not None:
                raise DescriptionError(f"the {side} has groups 0 to {num_groups - 1} only", field=f"{field}.{side}")
            continue
        if side not in sides:
            raise DescriptionError(f"{side} must be given", field=field)
        found.append(_table(mapping(sides[side], f"{field}.{side}"), tokens.get(group), f"{field}.{side}"))
    _check_ids(found, layout, side)
    return tuple(found)


def _table(data: dict[str, Any], tokens_per_block: int | None, field: str) -> BlockTable:
    if "block_ids" not in data:
        raise DescriptionError("block_ids must be given", field=field)
    ids = sequence(data["block_ids"], f"{field}.block_ids")
    for i, block in enumerate(ids):
        if not isinstance(block, int) or isinstance(block, bool) or block < HOLE:
            raise DescriptionError(
                f"{shown(block)} is not a block id, nor -1 for a hole", field=f"{field}.block_ids.{i}"
            )
    rest = {key: x for key, x in data.items() if key != "block_ids"}
    table = build(_Table, rest | {"block_ids": []}, field)
    if tokens_per_block is not None and table.first_token % tokens_per_block:
        raise DescriptionError(
            f"{table.first_token} is not the first token of a block; a block stands for {tokens_per_block} tokens",
            field=f"{field}.first_token",
        )
    _check_limit(table.first_token, f"{field}.first_token")
    return BlockTable(table.first_token, tuple(ids))


def _check_limit(num_tokens: int, field: str) -> None:
    if num_tokens > MAX_TOKENS:
        raise DescriptionError(f"{num_tokens} is too large; at most {MAX_TOKENS}", field=field)


def _check_ids(tables: list[BlockTable], layout: EngineLayout, side: str) -> None:
    """Refuse ids outside their regions, and destination blocks named twice where that would write them twice."""
    for group, table in enumerate(tables):
        regions = [
            rank.regions[item.region] for rank in layout.ranks for item in rank.components if item.group == group
        ]
        limit = min((region.num_blocks for region in regions), default=0)
        for i, block in enumerate(table.block_ids):
            if block >= limit:
                raise DescriptionError(
                    f"block {block} is not in [0, {limit})", field=f"groups.{group}.{side}.block_ids.{i}"
                )
    if side == "destination":
        _check_twice(tables, layout)


def _check_twice(tables: list[BlockTable], layout: EngineLayout) -> None:
    groups_of: dict[tuple[int, int], set[int]] = {}
    for number, rank in enumerate(layout.ranks):
        for item in rank.components:
            groups_of.setdefault((number, item.region), set()).add(item.group)
    for groups in {frozenset(found) for found in groups_of.values()}:
        seen: set[int] = set()
        for group in sorted(groups):
            for i, block in enumerate(tables[group].block_ids):
                if block != HOLE and block in seen:
                    raise DescriptionError(
                        f"block {block} is named twice; two tokens cannot lie in one place",
                        field=f"groups.{group}.destination.block_ids.{i}",
                    )
                seen.add(block)


def short_tables(request: Request, destination: Target) -> list[str]:
    """Return a sentence for each destination table that ends before the request's last token."""
    blocks = {item.group: item.block.tokens_per_block for rank in destination.layout.ranks for item in rank.components}
    found = []
    for group, table in enumerate(request.destination):
        tokens = blocks.get(group)
        end = table.first_token + len(table.block_ids) * (tokens or 0)
        if tokens is not None and end < request.num_tokens:
            found.append(
                f"groups.{group}.destination: its blocks end at token {end}, num_tokens is {request.num_tokens}; "
                "what has no block is not moved"
            )
    return found


def _needed(table: BlockTable, window: int | None, num_tokens: int) -> BlockTable:
    """Return the table with the first token that a sliding window still needs."""
    if window is None:
        return table
    return BlockTable(table.first_token, table.block_ids, max(table.first_token, num_tokens - window + 1))
