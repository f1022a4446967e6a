"""What crosses the side channel: tagged msgspec structs with limits on every field. No bytes, no sockets.

Rules of change: a new field has a default and goes last; no field is reordered or retyped; what an older peer
could misunderstand raises ``kvplan.wire.codec.PROTOCOL_VERSION`` instead.

Conversation, consumer rank on the left::

    HelloRequest  ->  front desk      Hello | NotReady | HelloRefused
    Introduce     ->  producer rank   Introduced | IntroduceRefused       once per engine, before claims
    Claim         ->  producer rank   Granted and/or Refused, per item    reads are posted at the same time
    Renew         ->  producer rank   Renewed                             one per heartbeat, all requests in it
    Done          ->  producer rank   DoneAck                             by reader identity, repeated until answered
    Release       ->  producer rank   Released                            nobody of this engine will read (any more)
    Digest        ->  producer rank   Digested | DigestRefused            to verify what came (kvplan.wire.digests)
    StatusRequest ->  either          Status | NotReady                   for people who look (kvplan.wire.status)
"""

from __future__ import annotations

from typing import Annotated, Union

from msgspec import Meta, Struct

from kvplan.wire.digests import Digest, Digested, DigestRefused
from kvplan.wire.fields import MAX_ITEMS, Count, Item, Name, Number, Offset, Seconds, Standalone, Text
from kvplan.wire.status import Status, StatusRequest

FEATURES = ("digest",)
"""What this package's ranks understand: ``digest`` is the question of ``kvplan.wire.digests``."""


class Party(Item, frozen=True):
    """One rank of one engine."""

    engine_id: Name
    rank: Count


class Reference(Item, frozen=True):
    """One offer."""

    request_id: Name
    generation: Name


class ClaimItem(Item, frozen=True):
    """One offer that is claimed."""

    request_id: Name
    generation: Name
    ticket: Name
    """Names the read: the same on every rank and in every repetition of it, another for another read."""
    tables_digest: Text = ""


class GrantItem(Item, frozen=True):
    """One offer that is kept for at least ``lease_s`` from when the message that asked was sent."""

    request_id: Name
    generation: Name
    lease_s: Seconds
    ticket: Text = ""


class RefusalItem(Item, frozen=True):
    """One offer that is not to be had, and why."""

    request_id: Name
    generation: Name
    reason: Name
    detail: Text = ""
    ticket: Text = ""


class DoneItem(Item, frozen=True):
    """One read that ended."""

    request_id: Name
    generation: Name
    ticket: Name
    ok: bool = True


class SpanBody(Item, frozen=True):
    """``kvplan.planner.Span``."""

    start: Offset
    stop: Offset
    offset_bytes: Offset
    stride_bytes: Offset
    slot: Count


class AxisBody(Item, frozen=True):
    """``kvplan.planner.Axis``."""

    name: Name
    spans: Annotated[tuple[SpanBody, ...], Meta(min_length=1, max_length=1 << 16)]


class BlockBody(Item, frozen=True):
    """``kvplan.planner.BlockLayout`` without its base, which differs from layer to layer; axes are indices."""

    axes: Annotated[tuple[Count, ...], Meta(max_length=16)]
    atom_bytes: Number
    format: Name
    tokens_per_block: Number | None


class RegionBody(Item, frozen=True):
    """``kvplan.planner.Region``."""

    base: Number
    num_blocks: Number
    block_stride_bytes: Number
    device: Name


class ComponentBody(Item, frozen=True):
    """``kvplan.planner.ComponentLayout``; layer, component and block are indices."""

    layer: Count
    component: Count
    group: Count
    region: Count
    block: Count
    base_bytes: Offset
    optional: bool


class RankBody(Item, frozen=True):
    """``kvplan.planner.RankLayout``."""

    tp: Count
    pp: Count
    dcp: Count
    regions: Annotated[tuple[RegionBody, ...], Meta(max_length=1 << 16)]
    components: Annotated[tuple[ComponentBody, ...], Meta(max_length=1 << 18)]


class LayoutBody(Struct, frozen=True, kw_only=True):
    """``kvplan.planner.EngineLayout`` with every repeated part in a table."""

    layers: Annotated[tuple[Name, ...], Meta(max_length=1 << 16)]
    components: Annotated[tuple[Name, ...], Meta(max_length=1 << 16)]
    axes: Annotated[tuple[AxisBody, ...], Meta(max_length=1 << 16)]
    blocks: Annotated[tuple[BlockBody, ...], Meta(max_length=1 << 16)]
    ranks: Annotated[tuple[RankBody, ...], Meta(min_length=1, max_length=4096)]


class RankCard(Item, frozen=True):
    """How one rank is reached."""

    control_address: Name
    transport: Name
    metadata: Annotated[bytes, Meta(max_length=16 << 20)]


class HelloRequest(Standalone, frozen=True, tag="hello_request"):
    """Asks who the engine is."""

    engine_id: Text = ""
    """The asker's engine."""


class Hello(Standalone, frozen=True, tag="hello", omit_defaults=True):
    """Everything that a peer needs to plan and to connect."""

    engine_id: Name
    compatibility: dict[Name, Text]
    layout: LayoutBody
    ranks: Annotated[tuple[RankCard, ...], Meta(min_length=1, max_length=4096)]
    """Parallel to the ranks of the layout."""
    features: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    """What its ranks understand beyond the first messages of this protocol version; see ``FEATURES``."""


class NotReady(Standalone, frozen=True, tag="not_ready"):
    """Ask again later."""

    detail: Text = ""


class HelloRefused(Standalone, frozen=True, tag="hello_refused"):
    """Do not ask again."""

    reason: Name
    detail: Text = ""


class Introduce(Standalone, frozen=True, tag="introduce"):
    """The reading engine's layout, from which the producer computes who reads what."""

    producer: Party
    """Whom the sender believes to be speaking to."""
    engine_id: Name
    layout: LayoutBody


class Introduced(Standalone, frozen=True, tag="introduced"):
    """The reading engine is known now."""

    producer: Party
    engine_id: Name


class IntroduceRefused(Standalone, frozen=True, tag="introduce_refused"):
    """The reading engine is not welcome, or not yet (``not_ready``)."""

    producer: Party
    engine_id: Name
    reason: Name
    detail: Text = ""


class Claim(Standalone, frozen=True, tag="claim"):
    """The reader reads these."""

    reader: Party
    items: Annotated[tuple[ClaimItem, ...], Meta(max_length=MAX_ITEMS)]


class Granted(Standalone, frozen=True, tag="granted"):
    """These are kept for the reader."""

    reader: Party
    items: Annotated[tuple[GrantItem, ...], Meta(max_length=MAX_ITEMS)]


class Refused(Standalone, frozen=True, tag="refused"):
    """These must not be believed, whatever bytes have arrived."""

    reader: Party
    items: Annotated[tuple[RefusalItem, ...], Meta(max_length=MAX_ITEMS)]


class Renew(Standalone, frozen=True, tag="renew"):
    """The reader still wants these."""

    reader: Party
    number: Number
    """Of this renewal; the answer repeats it."""
    items: Annotated[tuple[Reference, ...], Meta(max_length=MAX_ITEMS)]


class Renewed(Standalone, frozen=True, tag="renewed"):
    """What is kept, and what is not any more."""

    reader: Party
    number: Number
    items: Annotated[tuple[GrantItem, ...], Meta(max_length=MAX_ITEMS)] = ()
    lost: Annotated[tuple[RefusalItem, ...], Meta(max_length=MAX_ITEMS)] = ()


class Done(Standalone, frozen=True, tag="done"):
    """The reader does not touch these any more."""

    reader: Party
    items: Annotated[tuple[DoneItem, ...], Meta(max_length=MAX_ITEMS)]


class DoneAck(Standalone, frozen=True, tag="done_ack"):
    """These ``done`` have been heard."""

    reader: Party
    items: Annotated[tuple[DoneItem, ...], Meta(max_length=MAX_ITEMS)]


class Release(Standalone, frozen=True, tag="release"):
    """No rank of the sender's engine will claim these any more; running reads end with their own ``done``."""

    reader: Party
    items: Annotated[tuple[Reference, ...], Meta(max_length=MAX_ITEMS)]


class Released(Standalone, frozen=True, tag="released"):
    """These ``release`` have been heard."""

    reader: Party
    items: Annotated[tuple[Reference, ...], Meta(max_length=MAX_ITEMS)]


class Error(Standalone, frozen=True, tag="error"):
    """What was sent cannot be answered."""

    reason: Name
    detail: Text = ""


Message = Union[  # noqa: UP007 - msgspec wants a value, and this one has many lines
    HelloRequest,
    Hello,
    NotReady,
    HelloRefused,
    Introduce,
    Introduced,
    IntroduceRefused,
    Claim,
    Granted,
    Refused,
    Renew,
    Renewed,
    Done,
    DoneAck,
    Release,
    Released,
    Error,
    Digest,
    Digested,
    DigestRefused,
    StatusRequest,
    Status,
]
"""Every message of the present protocol version."""


class VersionRefused(Struct, frozen=True, kw_only=True):
    """Answer to a frame of a version that the receiver does not speak. Its own form never changes."""

    got: Annotated[int, Meta(ge=0, le=0xFFFF)]
    supported: Annotated[tuple[Annotated[int, Meta(ge=0, le=0xFFFF)], ...], Meta(max_length=64)]
