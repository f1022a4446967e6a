"""Digests that two processes compute alike: of block tables and of layouts. No secrets, no comparison rules."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvplan.planner import BlockTable
    from kvplan.wire.messages import LayoutBody


def tables_digest(tables: Sequence[BlockTable], num_tokens: int) -> str:
    """Return 32 hexadecimal digits that stand for a request's block tables and number of tokens."""
    rows = [(table.first_token, [int(block) for block in table.block_ids]) for table in tables]
    return _digest(b"tables", (rows, num_tokens))


def layout_digest(body: LayoutBody) -> str:
    """Return 32 hexadecimal digits that stand for an engine layout in its wire form."""
    return _digest(b"layout", body)


def fields_digest(fields: Mapping[str, str]) -> str:
    """Return 32 hexadecimal digits that stand for named fields, in whatever order they come.

    >>> fields_digest({"a": "1", "b": "2"}) == fields_digest({"b": "2", "a": "1"})
    True
    """
    return _digest(b"fields", sorted(fields.items()))


def _digest(kind: bytes, value: object) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=16, person=kind).hexdigest()
