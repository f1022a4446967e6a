"""What a front desk or a rank tells people who look: who it is, what it does, what went wrong. Nothing acts on it.

Everything is bounded: lists show the oldest, or the soonest to end, up to ``MAX_LINES``; the numbers say how many
there are.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from kvplan.wire.fields import Count, Item, Name, Number, Seconds, Standalone, Text

MAX_LINES = 64
"""Most entries of each list that are sent."""
_LINES = Meta(max_length=1024)
"""Most entries of each list that are accepted."""


class RankAddress(Item, frozen=True):
    """Where one rank is asked."""

    control_address: Name
    transport: Name


class PeerLine(Item, frozen=True):
    """One remote engine that reads are made from."""

    engine_id: Name
    address: Name
    """Of its front desk."""
    state: Name
    num_reads: Count
    """Reads from it that are not over."""
    detail: Text = ""
    """Why it is refused or gone."""


class ReadLine(Item, frozen=True):
    """One read that is not over."""

    request_id: Name
    engine_id: Name
    state: Name
    waits_for: Text
    age_s: Seconds
    num_bytes: Number = 0
    """Bytes that are to come, once the plan is bound."""
    arrived_bytes: Number = 0


class LeaseLine(Item, frozen=True):
    """One offer whose blocks are kept."""

    request_id: Name
    state: Name
    reader: Text
    """Engine that reads it; empty before the first claim."""
    left_s: Seconds
    """Until the lease ends, unless it is renewed."""
    num_reading: Count = 0
    num_done: Count = 0


class FailureLine(Item, frozen=True):
    """One read that failed."""

    age_s: Seconds
    request_id: Name
    engine_id: Text
    address: Text
    reason: Name
    detail: Text = ""


class StatusRequest(Standalone, frozen=True, tag="status_request"):
    """Asks for a ``Status``."""


class Status(Standalone, frozen=True, tag="status"):
    """How one front desk or one rank is."""

    role: Name
    """``front_desk`` or ``rank``."""
    engine_id: Name
    rank: Count = 0
    num_ranks: Count = 0
    version: Text = ""
    """Of kvplan."""
    protocol: Number = 0
    uptime_s: Seconds = 0.0
    host: Text = ""
    pid: Number = 0
    transport: Text = ""
    facts: dict[Name, Text] = field(default_factory=dict)
    """The compatibility fields, ``info.`` ones included; a front desk's only."""
    ranks: Annotated[tuple[RankAddress, ...], Meta(max_length=4096)] = ()
    """Whom to ask next; a front desk's only."""
    values: Annotated[dict[Name, float], Meta(max_length=8192)] = field(default_factory=dict)
    """A snapshot by the names of ``kvplan.session.declared``."""
    peers: Annotated[tuple[PeerLine, ...], _LINES] = ()
    reads: Annotated[tuple[ReadLine, ...], _LINES] = ()
    leases: Annotated[tuple[LeaseLine, ...], _LINES] = ()
    failures: Annotated[tuple[FailureLine, ...], _LINES] = ()
    """The latest first."""
