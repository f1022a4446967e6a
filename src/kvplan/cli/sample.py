"""A made-up request of so many tokens, for costs before any request exists. No costs, no output.

Block ids are scattered (no two are neighbours), which is what a busy engine's blocks are like: descriptors are counted
as if nothing merged across blocks. Sliding windows keep only their last tokens, as engines do. Regions get room for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvplan.cli.request_file import Request
from kvplan.layouts.sliding_window import first_kept_token
from kvplan.planner import BlockTable, EngineLayout, RankLayout

if TYPE_CHECKING:
    from kvplan.cli.engine_file import Target

SCATTER = 2
"""Distance of the sample's block ids."""


def sample_request(source: Target, destination: Target, num_tokens: int) -> Request:
    """Return a request that needs everything: nothing is cached at the destination."""
    tables = [tuple(_tables(target, num_tokens)) for target in (source, destination)]
    needed = tuple(
        table if window is None else replace(table, needed_from=max(table.first_token, num_tokens - window + 1))
        for group, table in enumerate(tables[1])
        for window in [destination.window(group)]
    )
    return Request(num_tokens, tables[0], needed)


def roomy(target: Target, num_tokens: int) -> Target:
    """Return the target with as many blocks in every region as the sample needs."""
    num_groups = 1 + max(item.group for rank in target.layout.ranks for item in rank.components)
    num_blocks = SCATTER * num_groups * (num_tokens + 2)
    ranks = tuple(_roomy(rank, num_blocks) for rank in target.layout.ranks)
    return replace(target, layout=EngineLayout(target.layout.engine_id, ranks))


def _roomy(rank: RankLayout, num_blocks: int) -> RankLayout:
    regions, base = [], 1 << 12
    for region in rank.regions:
        wider = replace(region, base=base, num_blocks=max(num_blocks, region.num_blocks))
        base += wider.num_bytes
        regions.append(wider)
    return replace(rank, regions=tuple(regions))


def _tables(target: Target, num_tokens: int) -> list[BlockTable]:
    tokens = {item.group: item.block.tokens_per_block for rank in target.layout.ranks for item in rank.components}
    found: list[BlockTable] = []
    for group in range(max(tokens, default=-1) + 1):
        per_block = tokens.get(group)
        free = SCATTER * (1 + sum(len(table.block_ids) for table in found))
        if per_block is None:
            found.append(BlockTable(0, (free,)))
            continue
        window = target.window(group)
        first = 0 if window is None else first_kept_token(num_tokens, window, per_block)
        count = -(-num_tokens // per_block)
        found.append(BlockTable(first, tuple(free + SCATTER * i for i in range(count - first // per_block))))
    return found
