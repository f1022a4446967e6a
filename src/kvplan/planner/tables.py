"""Block tables: which blocks a request holds, by token position. No bytes.

A table carries the token position of its first block: two sides are aligned by token position, never by list
length and never from the tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import BindError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.planner.plan import PlanPart
    from kvplan.planner.table import Ints

HOLE = -1
"""Block id that names no block: nothing is read from it or written to it."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Logical blocks of one group of one request on one side.

    Entry i stands for the tokens from ``first_token + i * tokens_per_block``; -1 is a hole. For a state group the
    entries are the state blocks themselves, and ``first_token`` has no meaning.
    """

    first_token: int
    block_ids: Sequence[int]
    """Any sequence of ints; an int64 array is taken as it is."""
    needed_from: int | None = None
    """First token that the destination cannot do without (a sliding window begins later than its first block);
    None means ``first_token``."""

    def ids(self) -> Ints:
        """Return the block ids, int64."""
        return np.asarray(self.block_ids, dtype=np.int64)


def laid_out(table: BlockTable, tokens_per_block: int, period_tokens: int, num_tokens: int) -> Ints:
    """Return block ids as (periods, blocks per period), from token 0 to the period that holds the last token.

    Blocks that the table does not name, and blocks that start at ``num_tokens`` or later, are holes.
    """
    if table.first_token % tokens_per_block or table.first_token < 0:
        raise BindError(f"first_token {table.first_token} is not a multiple of tokens_per_block {tokens_per_block}")
    slots = period_tokens // tokens_per_block
    ids = np.full(math.ceil(num_tokens / period_tokens) * slots, HOLE, np.int64)
    first = table.first_token // tokens_per_block
    last = math.ceil(num_tokens / tokens_per_block)
    given = table.ids()[: max(0, last - first)]
    ids[first : first + len(given)] = given
    return ids.reshape(-1, slots)


def check_cover(part: PlanPart, source: BlockTable, destination: BlockTable, num_tokens: int) -> None:
    """Refuse a request in which a destination block needs tokens that no source block holds."""
    period = part.period_tokens or 1
    s_tokens, d_tokens = part.source_tokens or 1, part.destination_tokens or 1
    unit = math.gcd(s_tokens, d_tokens)
    held = np.repeat(laid_out(source, s_tokens, period, num_tokens).reshape(-1) >= 0, s_tokens // unit)
    wanted = np.repeat(laid_out(destination, d_tokens, period, num_tokens).reshape(-1) >= 0, d_tokens // unit)
    needed_from = destination.first_token if destination.needed_from is None else destination.needed_from
    wanted[: needed_from // unit] = False
    wanted[math.ceil(num_tokens / unit) :] = False
    lacking = np.flatnonzero(wanted & ~held)
    if len(lacking):
        first = int(lacking[0]) * unit
        raise BindError(
            f"group {part.destination_group}: the destination needs tokens from {max(first, needed_from)}, "
            f"but the source has no block for them (source table begins at token {source.first_token} "
            f"with {len(source.block_ids)} blocks of {s_tokens} tokens)"
        )
