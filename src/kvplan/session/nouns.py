"""What the engine thread hands to a session and gets back: plain values. No states, no messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplan.planner import BlockTable, RankLayout


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks that the producer keeps for a reader."""

    request_id: str
    """The producer's own id of the request."""
    generation: str
    """Nonce made anew for every offer; a reference with another one is stale."""
    tables: tuple[BlockTable, ...]
    """Block tables by group; exactly those that the reference carries, or empty to leave that unchecked."""
    num_tokens: int
    lease_s: float = 0.0
    """How long the offer waits for its first reader; 0 means the session's default."""


@dataclass(frozen=True, slots=True)
class RemoteRef:
    """A reference to an offer of another engine, as it came through the router."""

    engine_id: str
    host: str
    port: int
    """Host and port of the producer's front desk."""
    request_id: str
    """The producer's id of the request."""
    generation: str
    tables: tuple[BlockTable, ...]
    """Block tables by the producer's group index."""
    num_tokens: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes two references the same: (engine id, request id, generation)."""
        return (self.engine_id, self.request_id, self.generation)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read a referenced request's cache into local blocks."""

    request_id: str
    """The consumer's own id; the same on all of its ranks."""
    remote: RemoteRef
    tables: tuple[BlockTable, ...]
    """Local block tables by the consumer's group index. Tokens before ``first_token`` are already here."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a read ended without its bytes."""

    reason: str
    """One of ``REASONS``: bounded, good as a metric label."""
    detail: str = ""
    """One sentence for a person: what happened, with whom, what would help."""


@dataclass(frozen=True, slots=True)
class Results:
    """What ended since the last call; each request is reported exactly once."""

    sent: frozenset[str] = frozenset()
    """Offers that nobody reads any more: their blocks are free on this rank."""
    received: frozenset[str] = frozenset()
    """Reads whose bytes are here and were granted."""
    failed: dict[str, Failure] = field(default_factory=dict)
    """Reads whose blocks hold nothing of use; no write into them is outstanding."""

    def __bool__(self) -> bool:
        return bool(self.sent or self.received or self.failed)


@dataclass(frozen=True, slots=True)
class RankHello:
    """What one rank tells its front desk; plain values that may cross processes of one engine."""

    layout: RankLayout
    control_address: str
    """``host:port`` of the rank's control thread."""
    transport: str
    """Name of the transport."""
    metadata: bytes
    """What the transport's ``connect`` on the other side wants."""


REASONS = {
    "aborted": "the read was cancelled here",
    "bind_failed": "the block tables do not fit the layouts",
    "claim_unanswered": "the producer did not answer the claim in time",
    "claimed_by_another": "another read already uses the reference",
    "closing": "this session is shutting down",
    "digest_mismatch": "the bytes that arrived are not the producer's; the detail names the first wrong coordinate",
    "engine_restarted": "another engine answers at the reference's address",
    "expired": "the reference's lease has ended",
    "handshake_failed": "the peer answered the handshake with something that cannot be used",
    "handshake_timeout": "the peer did not answer the handshake in time",
    "not_elected": "the two sides disagree about which ranks read from which",
    "incompatible": "the two engines must not exchange cache",
    "lease_lost": "the lease ended, or could not be proven alive, while bytes were still on their way",
    "overloaded": "a bounded queue was full",
    "peer_gone": "the peer's process is gone",
    "peer_not_allowed": "the peer's address is not on the allow list",
    "refused": "the producer refused for a reason that this version does not know",
    "released": "the reference was already read or released",
    "stale_generation": "the request id is in use by a newer offer",
    "tables_differ": "the reference's block tables are not those that were offered",
    "transport_error": "the transport could not move the bytes",
    "transfer_timeout": "the bytes did not arrive in time",
    "unknown": "the producer does not know the reference",
    "verify_failed": "the bytes could not be compared with the producer's in time",
    "verify_unsupported": "the bytes cannot be compared: device memory, or a producer that knows no digests",
    "withdrawn": "the producer's request was aborted",
}
"""Every reason of a ``Failure``, with what it means."""
