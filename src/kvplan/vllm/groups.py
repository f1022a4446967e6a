"""KV cache groups: from vLLM's block id lists to block tables with token positions, and back. No layers' bytes.

Rules, per group that takes part in transfers (``KVCacheConfig.transfer_groups``, in that order):

1. Entry ``i`` of an attention group's list stands for the tokens from ``i * tokens_per_block``. A null block (id 0)
   holds nothing: it becomes a hole. Leading holes are dropped by moving ``first_token``.
2. A table covers ``[first, last)``: what the reader lacks and the writer has. Lookahead blocks behind ``last`` and
   blocks before ``first`` are not in it.
3. A state group's list has the state after token ``n`` at entry ``ceil(n / block_size) - 1`` (vLLM 0.32
   ``MambaManager``: one block when states are not cached, position-indexed otherwise); speculative scratch blocks
   lie behind it. Its table is that one block, and stands for exactly ``n`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvplan.errors import BindError, UnsupportedError
from kvplan.planner import HOLE, BlockTable

if TYPE_CHECKING:
    from collections.abc import Sequence

NULL_BLOCK = 0
"""vLLM's placeholder block: nothing is ever stored in it (``v1/core/block_pool.py``)."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group that takes part in transfers."""

    index: int
    """Position among the groups that take part: the planner's group index."""
    tokens_per_block: int
    """Tokens of the sequence that one block id stands for."""
    is_state: bool = False
    """True when a block holds the state after the last token instead of tokens."""
    window: int | None = None
    """Tokens that a query sees, its own included, where vLLM drops the blocks before them."""
    chunk: int | None = None
    """Tokens of a chunk, where a query sees its own chunk only and vLLM drops the blocks before it."""

    @property
    def drops_blocks(self) -> bool:
        """Whether blocks that later tokens do not need are dropped."""
        return self.window is not None or self.chunk is not None

    def first_needed(self, token: int) -> int:
        """Return the first token that a query at ``token`` sees.

        >>> [Group(0, 32, window=64).first_needed(99), Group(0, 32, chunk=64).first_needed(99)]
        [36, 64]
        """
        if self.window is not None:
            return max(0, token - self.window + 1)
        return 0 if self.chunk is None else token // self.chunk * self.chunk


def read_groups(kv_cache_config: Any, *, dcp: int = 1) -> tuple[Group, ...]:
    """Return the groups of a vLLM ``KVCacheConfig``."""
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, iter_layer_specs

    groups = []
    for index, group in enumerate(kv_cache_config.transfer_groups):
        specs = tuple(iter_layer_specs(group.kv_cache_spec))
        if group.host_resident:
            raise UnsupportedError(f"KV cache group {index} lives in a host pool of its own, which is not supported")
        is_state = all(isinstance(spec, MambaSpec) for spec in specs)
        if not is_state and not all(isinstance(spec, AttentionSpec) for spec in specs):
            kinds = sorted({type(spec).__name__ for spec in specs})
            raise UnsupportedError(f"KV cache group {index} has {', '.join(kinds)}; attention and Mamba groups work")
        sharded = dcp if specs and specs[0].dcp_sharded and not is_state else 1
        tokens = group.kv_cache_spec.block_size * sharded
        groups.append(Group(index, tokens, is_state, _seen(specs, "SlidingWindowSpec", "sliding_window"),
                            _seen(specs, "ChunkedLocalAttentionSpec", "attention_chunk_size")))  # fmt: skip
    return tuple(groups)


def _seen(specs: Sequence[Any], kind: str, name: str) -> int | None:
    """Return the tokens that a query of the group's layers sees, when all are of that kind; the largest of them."""
    if not specs or any(type(spec).__name__ != kind for spec in specs):
        return None
    return max(int(getattr(spec, name)) for spec in specs)


def select(kv_cache_config: Any, block_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the lists of the groups that take part, from lists of all groups."""
    return tuple(tuple(ids) for ids in kv_cache_config.select_transfer_block_ids(block_ids))


def block_tables(
    groups: Sequence[Group], block_ids: Sequence[Sequence[int]], *, first: int, last: int
) -> tuple[BlockTable, ...]:
    """Return each group's table over the tokens ``[first, last)``.

    Raises ``BindError`` when a list is too short, a state block is missing, or ``first`` lies inside a block: then a
    transfer would not be provably right.

    >>> block_tables([Group(0, 32)], [[7, 8, 9, 10]], first=32, last=70)
    (BlockTable(first_token=32, block_ids=(8, 9)),)
    >>> block_tables([Group(0, 32)], [[0, 2, 3]], first=0, last=96)
    (BlockTable(first_token=32, block_ids=(2, 3)),)
    """
    if len(groups) != len(block_ids):
        raise BindError(f"{len(block_ids)} block id lists for {len(groups)} groups")
    if not 0 <= first < last:
        raise BindError(f"tokens [{first}, {last}) are not an interval")
    table = {False: _attention_table, True: _state_table}
    return tuple(table[group.is_state](group, ids, first, last) for group, ids in zip(groups, block_ids, strict=True))


def _attention_table(group: Group, ids: Sequence[int], first: int, last: int) -> BlockTable:
    size = group.tokens_per_block
    if first % size:
        raise BindError(f"group {group.index}: token {first} lies inside a block of {size}")
    start, stop = first // size, -(last // -size)
    if len(ids) < stop:
        raise BindError(f"group {group.index}: {len(ids)} blocks of {size} tokens for {last} tokens")
    while start < stop and ids[start] == NULL_BLOCK:
        start += 1
    return BlockTable(start * size, tuple(HOLE if item == NULL_BLOCK else item for item in ids[start:stop]))


def _state_table(group: Group, ids: Sequence[int], first: int, last: int) -> BlockTable:
    entry = -(last // -group.tokens_per_block) - 1
    if entry >= len(ids) or ids[entry] == NULL_BLOCK:
        raise BindError(f"group {group.index}: no block holds the state after token {last} (blocks {list(ids)})")
    return BlockTable(0, (ids[entry],))


def with_needs(groups: Sequence[Group], tables: Sequence[BlockTable], *, last: int) -> tuple[BlockTable, ...]:
    """Return a reader's tables with the first token that its next query, at ``last``, cannot do without.

    Where vLLM drops blocks that are seen no more, the first block of a table may begin earlier than that.
    """
    return tuple(
        replace(table, needed_from=max(table.first_token, group.first_needed(last))) if group.drops_blocks else table
        for group, table in zip(groups, tables, strict=True)
    )


def half_filled_blocks(groups: Sequence[Group], tables: Sequence[BlockTable], first_kept: int) -> set[int]:
    """Return a reader's blocks of dropping groups that begin before ``first_kept``, the writer's first kept token.

    The next query needs nothing of what is missing in them, but another request that found them in the prefix cache
    would. Such blocks exist only where block sizes differ.

    >>> half_filled_blocks([Group(0, 64, window=64)], [BlockTable(64, (5, 6))], 96)
    {5}
    """
    return {
        block_id
        for group, table in zip(groups, tables, strict=True)
        if group.drops_blocks
        for entry, block_id in enumerate(table.block_ids)
        if block_id != HOLE and table.first_token + entry * group.tokens_per_block < first_kept
    }
