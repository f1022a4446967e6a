"""One read, its sources and its pieces: what is known about them, and what follows. No messages, no transport calls.

A read has one source per producer rank that it reads from; a source has one claim and any number of pieces.

The read succeeds when for every source (a) all pieces have arrived, (b) the claim is granted, (c) the last piece was
seen to have arrived before the lease, as far as *this* side can prove it, was over. The proof needs no common clock:
a lease of L seconds in an answer runs at least until L seconds after *we sent the question*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvplan.session.lifecycle import (
    CLAIM,
    PIECE,
    READ,
    ClaimEvent,
    ClaimState,
    PieceEvent,
    PieceState,
    ReadEvent,
    ReadState,
    advance,
    is_allowed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.planner import Descriptors
    from kvplan.session.link import Link
    from kvplan.session.nouns import Failure, ReadRequest
    from kvplan.session.peers import Peer
    from kvplan.transport.base import Device, Handle


class ClaimKey(NamedTuple):
    """What names a claim on its link."""

    request_id: str
    generation: str
    ticket: str


@dataclass(slots=True, eq=False)
class Piece:
    """One batch of a source: straight into the request's blocks, or through the staging area."""

    source: Source
    peer: str
    """Name of the producer rank for the transport."""
    runs: Descriptors
    """From the producer to here; staged ones have destinations relative to their slot."""
    scatter: Descriptors | None = None
    """From the slot to the request's blocks; None for a piece that is not staged."""
    state: PieceState = PieceState.WAITING
    handle: Handle | None = None
    slot: int | None = None
    """Part of the staging area that it fills."""
    posted_at: float = 0.0
    """On the clock of ``time.perf_counter``, to measure how long it takes."""
    num_failures: int = 0

    def step(self, event: PieceEvent) -> None:
        """Advance the state."""
        self.state = advance(PIECE, self.state, event)

    @property
    def writes_blocks(self) -> bool:
        """Whether something may write into the request's own blocks at this moment."""
        straight = self.state is PieceState.POSTED and self.scatter is None
        return straight or self.state is PieceState.SCATTERING


@dataclass(slots=True, eq=False)
class Source:
    """One producer rank that a read reads from."""

    read: Read
    link: Link
    key: ClaimKey
    remote_device: Device
    pieces: list[Piece] = field(default_factory=list)
    claim: ClaimState = ClaimState.ASKED
    asked_at: float = math.inf
    """When the claim was first sent; infinite before."""
    valid_until: float = -math.inf
    """Until when the lease is proven to last."""
    arrived_at: float | None = None
    """When all pieces were seen to have arrived."""

    def step(self, event: ClaimEvent) -> bool:
        """Advance the claim; return False, changing nothing, when its state does not allow the event."""
        if not is_allowed(CLAIM, self.claim, event):
            return False
        self.claim = advance(CLAIM, self.claim, event)
        return True

    def prove(self, until: float) -> None:
        """Take a lease that is proven to last until then."""
        self.valid_until = max(self.valid_until, until)

    def note_arrival(self, now: float) -> None:
        """Note that a piece has arrived; the last one's time counts."""
        if all(piece.state is PieceState.ARRIVED for piece in self.pieces):
            self.arrived_at = now

    @property
    def is_complete(self) -> bool:
        """Whether bytes and grant are here; the lease is another question."""
        return self.claim is ClaimState.GRANTED and self.arrived_at is not None

    def is_covered(self, margin_s: float) -> bool:
        """Whether the bytes arrived while the lease is proven to have lasted."""
        return self.arrived_at is not None and self.arrived_at <= self.valid_until - margin_s


@dataclass(slots=True, eq=False)
class Read:
    """One local request."""

    request: ReadRequest
    peer: Peer
    tables_digest: str
    """Of the reference's tables; the producer compares it with what it offered."""
    state: ReadState = ReadState.WAITING
    asked_at: float = 0.0
    """When the engine asked for it."""
    began_at: float = 0.0
    """When its claims were made."""
    sources: list[Source] = field(default_factory=list)
    failure: Failure | None = None

    def step(self, event: ReadEvent) -> None:
        """Advance the state."""
        self.state = advance(READ, self.state, event)

    @property
    def request_id(self) -> str:
        """The consumer's id of the request."""
        return self.request.request_id

    def pieces(self) -> Iterator[Piece]:
        """Iterate over all pieces of all sources."""
        return (piece for source in self.sources for piece in source.pieces)

    @property
    def is_over(self) -> bool:
        """Whether the read has been reported."""
        return self.state in {ReadState.RECEIVED, ReadState.FAILED}

    @property
    def is_written(self) -> bool:
        """Whether a carrier may still write into the read's blocks."""
        return any(piece.writes_blocks for piece in self.pieces())

    @property
    def is_complete(self) -> bool:
        """Whether bytes and grants of all sources are here."""
        return all(source.is_complete for source in self.sources)

    def uncovered(self, margin_s: float) -> list[Source]:
        """Return the sources whose bytes arrived later than their lease is proven to have lasted."""
        return [source for source in self.sources if not source.is_covered(margin_s)]
