"""What people see of a session: its reads, peers and leases as lines of a ``Status``. Looks, and changes nothing.

The control thread answers questions; the reader thread's part comes to it as a finished, immutable ``ReaderView``. So
neither thread looks into what the other changes.
"""

from __future__ import annotations

import heapq
import os
import platform
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kvplan.session.lifecycle import ClaimState, PieceState, ReadState
from kvplan.version import __version__
from kvplan.wire.codec import PROTOCOL_VERSION
from kvplan.wire.status import MAX_LINES, FailureLine, LeaseLine, PeerLine, RankAddress, ReadLine, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvplan.session.config import Identity
    from kvplan.session.nouns import RankHello
    from kvplan.session.offers import OfferBook
    from kvplan.session.peers import Peer
    from kvplan.session.reads import Read
    from kvplan.session.stats import Stats

FRESH_S = 0.05
"""How old the reader thread's view may be while it works; when it goes to sleep it always leaves a new one."""
MAX_LOOKED_AT = 4096
"""Offers among which the soonest to end are looked for: a question must not cost more than so much."""


class ReaderView(NamedTuple):
    """What the reader thread shows."""

    peers: tuple[PeerLine, ...] = ()
    reads: tuple[ReadLine, ...] = ()


def reader_view(peers: Iterable[Peer], reads: Iterable[Read], now: float) -> ReaderView:
    """Return the peers and the oldest reads."""
    return ReaderView(
        tuple(_peer_line(peer) for peer in islice(peers, MAX_LINES)),
        tuple(_read_line(read, now) for read in islice(reads, MAX_LINES)),
    )


def lease_lines(offers: OfferBook, now: float) -> tuple[LeaseLine, ...]:
    """Return the offers whose leases end first."""
    live = [(offers.ends_at(key), key, entry) for key, entry in islice(offers.live().items(), MAX_LOOKED_AT)]
    soonest = heapq.nsmallest(MAX_LINES, live, key=lambda item: item[0])
    return tuple(
        LeaseLine(
            request_id=_name(key.request_id),
            state=entry.state.name.lower(),
            reader=entry.owner.engine_id if entry.owner else "",
            left_s=max(0.0, ends_at - now),
            num_reading=len(entry.claimed),
            num_done=len(entry.done),
        )
        for ends_at, key, entry in soonest
    )


class Describer:
    """Answers ``StatusRequest`` for one rank. The reader thread sets ``view``; all else is the control thread's."""

    def __init__(self, *, identity: Identity, transport: str, stats: Stats, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._transport = transport
        self._stats = stats
        self._clock = clock
        self._began_at = clock()
        self.view = ReaderView()

    def status(self, offers: OfferBook) -> Status:
        """Return how the rank is now."""
        now = self._clock()
        self._stats.add("status_requests")
        return Status(
            role="rank",
            engine_id=self._identity.engine_id,
            rank=self._identity.rank,
            num_ranks=self._identity.num_ranks,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            uptime_s=now - self._began_at,
            host=platform.node()[:4096],
            pid=os.getpid(),
            transport=self._transport,
            values=self._stats.snapshot(),
            peers=self.view.peers,
            reads=self.view.reads,
            leases=lease_lines(offers, now),
            failures=failure_lines(self._stats),
        )


def desk_status(
    *, engine_id: str, facts: Mapping[str, str], ranks: Sequence[RankHello], stats: Stats, uptime_s: float
) -> Status:
    """Return how a front desk is now."""
    stats.add("status_requests")
    return Status(
        role="front_desk",
        engine_id=engine_id,
        num_ranks=len(ranks),
        version=__version__,
        protocol=PROTOCOL_VERSION,
        uptime_s=uptime_s,
        host=platform.node()[:4096],
        pid=os.getpid(),
        facts=dict(facts),
        ranks=tuple(RankAddress(rank.control_address, rank.transport) for rank in ranks),
        values=stats.snapshot(),
    )


def failure_lines(stats: Stats) -> tuple[FailureLine, ...]:
    """Return the latest failures, the latest first."""
    return tuple(
        FailureLine(
            age_s=age_s,
            request_id=_name(note.request_id),
            engine_id=note.engine_id[:512],
            address=note.address[:512],
            reason=note.reason,
            detail=note.detail[:1024],
        )
        for age_s, note in stats.recent_failures()
    )


def _peer_line(peer: Peer) -> PeerLine:
    return PeerLine(
        engine_id=_name(peer.engine_id),
        address=str(peer.desk),
        state=peer.state.name.lower(),
        num_reads=len(peer.reads),
        detail=f"{peer.failure.reason}: {peer.failure.detail}"[:1024] if peer.failure else "",
    )


def _read_line(read: Read, now: float) -> ReadLine:
    pieces = list(read.pieces())
    return ReadLine(
        request_id=_name(read.request_id),
        engine_id=_name(read.peer.engine_id),
        state=read.state.name.lower(),
        waits_for=_waits_for(read),
        age_s=max(0.0, now - read.asked_at),
        num_bytes=sum(piece.runs.total_bytes for piece in pieces),
        arrived_bytes=sum(piece.runs.total_bytes for piece in pieces if piece.state is PieceState.ARRIVED),
    )


def _waits_for(read: Read) -> str:
    """Return what would let a read go on."""
    if read.state is ReadState.WAITING:
        return "hello"
    if read.state is ReadState.DRAINING:
        return "the end of its last write"
    if read.state is ReadState.VERIFYING:
        return "digests"
    asked = [source.link.them.rank for source in read.sources if source.claim is ClaimState.ASKED]
    if asked:
        return f"the grant of rank {', '.join(map(str, asked[:8]))}"
    return "bytes" if any(source.arrived_at is None for source in read.sources) else "proof of the lease"


def _name(text: str) -> str:
    """Return a name that fits the wire."""
    return text[:512] or "-"
