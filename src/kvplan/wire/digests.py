"""The question that verifies what a claim has brought, and its answers. No digest is computed or compared here.

A reader that has its bytes and its grant asks the rank that they come from, and compares: first every component, then
parts of the strands of one that differs, then parts of the tokens of one strand (``kvplan.session.digest``).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvplan.wire.fields import MAX_ITEMS, Count, Item, Name, Number, Standalone, Text, Unsigned

MAX_PARTS = 256
"""Most digests of parts in one answer."""

BlockId = Annotated[int, Meta(ge=-1, lt=1 << 40)]


class TableItem(Item, frozen=True):
    """``kvplan.planner.BlockTable``; -1 is a hole."""

    first_token: Number
    block_ids: Annotated[tuple[BlockId, ...], Meta(max_length=1 << 20)]


class ScopeItem(Item, frozen=True):
    """``kvplan.session.digest.Scope``: what digests are asked of."""

    layer: Text = ""
    component: Text = ""
    strand: Number | None = None
    first: Number = 0
    stop: Number | None = None


class ComponentDigest(Item, frozen=True):
    """Digest of all that a claim brings of one component."""

    layer: Text
    component: Text
    digest: Unsigned


class Digest(Standalone, frozen=True, tag="digest"):
    """Asks for the digests of what a granted claim brings."""

    engine_id: Name
    """The reader's."""
    rank: Count
    """The reader's."""
    number: Number
    """Of the question; the answer repeats it."""
    request_id: Name
    generation: Name
    ticket: Name
    tables: Annotated[tuple[TableItem, ...], Meta(max_length=MAX_ITEMS)]
    """The reader's own: they say which tokens it has from elsewhere."""
    scope: ScopeItem = ScopeItem()


class Digested(Standalone, frozen=True, tag="digested"):
    """The digests, of bytes that did not change from the grant until now."""

    engine_id: Name
    rank: Count
    number: Number
    components: Annotated[tuple[ComponentDigest, ...], Meta(max_length=1 << 18)] = ()
    """When everything was asked for."""
    parts: Annotated[tuple[Unsigned, ...], Meta(max_length=MAX_PARTS)] = ()
    """Otherwise, of the scope's parts."""
    total: Number = 0
    """How many components, strands or tokens there are."""


class DigestRefused(Standalone, frozen=True, tag="digest_refused"):
    """There are no such digests, or not now."""

    engine_id: Name
    rank: Count
    number: Number
    reason: Name
    detail: Text = ""
