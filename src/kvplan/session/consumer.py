"""Consumer: one rank's reads, from the request to its report. Values, messages and times in; no threads, no sockets.

1. ``read`` finds the peer, or asks for its hello; a read waits a bounded time for first contact.
2. Then the peer's proved plan is bound to the block tables, a claim goes to each source rank, and the reads are posted.
3. Answers and ended pieces settle a read: bytes, grants, a proven lease, and where wanted equal digests, are success.
4. All else is a failure with a reason. It is reported when no carrier can write into the blocks any more, not before.

What is said leaves through ``send``; what time brings about happens in ``tick``.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from kvplan.errors import BindError, KVPlanError, OverloadedError, RefusedError
from kvplan.session.binding import bound_runs, check_devices, configured_cost, pieces_of
from kvplan.session.carrier import Carrier
from kvplan.session.conversation import Conversation
from kvplan.session.lease import LeaseBook
from kvplan.session.lifecycle import ClaimState, PeerState, PieceEvent, PieceState, ReadEvent, ReadState
from kvplan.session.nouns import Failure
from kvplan.session.overdue import overdue
from kvplan.session.reads import ClaimKey, Read, Source
from kvplan.session.reports import Reports, failure_of, refused_by
from kvplan.session.routing import route
from kvplan.session.verifier import Verifier
from kvplan.session.view import reader_view
from kvplan.session.worker import AT_ONCE
from kvplan.transport.base import Device
from kvplan.wire.fingerprint import tables_digest
from kvplan.wire.messages import Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvplan.planner import EngineLayout, PairPlan, RankLayout
    from kvplan.session.carrier import Ended
    from kvplan.session.config import Identity, SessionConfig
    from kvplan.session.conversation import Outcome
    from kvplan.session.nouns import ReadRequest, RemoteRef, Results
    from kvplan.session.peers import Peer
    from kvplan.session.reads import Piece
    from kvplan.session.stats import Stats
    from kvplan.session.view import ReaderView
    from kvplan.session.worker import Hands
    from kvplan.transport.base import Transport
    from kvplan.wire.addresses import Address
    from kvplan.wire.messages import Message

logger = logging.getLogger(__name__)


class Consumer:
    """The consumer's side of one rank."""

    def __init__(
        self,
        *,
        identity: Identity,
        layout: RankLayout,
        config: SessionConfig,
        stats: Stats,
        transport: Transport,
        send: Callable[[Address, Message], object],
        hang_up: Callable[[Address], object],
        hands: Hands = AT_ONCE,
        scatter: Hands = AT_ONCE,
    ) -> None:
        self._config = config
        self._stats = stats
        self._transport = transport
        self._closing = False
        self._reads: dict[str, Read] = {}
        self._deadlines = LeaseBook[str]()
        self._reports = Reports(stats)
        self._sweep_at = -math.inf
        device = Device.parse(check_devices(layout))
        self._cost = configured_cost(transport.name, config)
        self._carrier = Carrier(transport=transport, local_device=device, config=config, stats=stats, hands=scatter)
        self._talk = Conversation(
            identity=identity, config=config, stats=stats, transport=transport.name, send=send, hang_up=hang_up
        )
        self._book = self._talk.book
        self._verifier = Verifier(identity=identity, layout=layout, config=config, stats=stats, send=send, hands=hands)

    @property
    def own(self) -> EngineLayout | None:
        """The layout of the engine that this rank belongs to, once its front desk has told."""
        return self._book.own

    @property
    def is_quiet(self) -> bool:
        """Whether no byte can be written any more, and every rank has heard what concerns it."""
        return not self._carrier.num_busy and self._talk.is_quiet

    def set_own_desk(self, address: Address) -> None:
        """Say where our own engine's hello is to be had."""
        self._book.set_own_desk(address)

    def read(self, request: ReadRequest, now: float) -> None:
        """Begin a read, now or when its peer is known."""
        if request.request_id in self._reads:
            self._stats.add("duplicates_ignored")
            return
        self._stats.add("reads")
        try:
            peer = self._peer(request.remote, now)
            digest = tables_digest(request.remote.tables, request.remote.num_tokens)
        except KVPlanError as error:
            self._reports.failed(request, failure_of(error))
            return
        read = Read(request, peer, digest, asked_at=now)
        self._reads[read.request_id] = read
        peer.reads[read] = None
        if peer.failure is not None:
            self._fail(read, peer.failure, now)
        elif peer.state is PeerState.ASKING:
            self._deadlines.extend(read.request_id, now + self._config.handshake_timeout_s)
        else:
            self._begin(read, now)

    def cancel(self, request_id: str, now: float) -> None:
        """Give up a read."""
        read = self._reads.get(request_id)
        if read is None:
            self._stats.add("aborts_unknown")
        elif read.failure is None:
            waited = read.state is ReadState.WAITING
            self._fail(read, Failure("aborted", "the request was cancelled on this side"), now)
            if waited:
                self.release(read.request.remote, now)

    def renew(self, remotes: Sequence[RemoteRef], now: float) -> None:
        """Keep the leases of references that wait here."""
        for remote in remotes:
            reference = Reference(remote.request_id, remote.generation)
            peer = self._peer_for_notice(remote, now)
            if peer is not None:
                peer.to_hold[reference] = now + self._config.hold_s
                self._tell_waiting(peer, now)

    def release(self, remote: RemoteRef, now: float) -> None:
        """Tell the producer that this engine will not read a reference."""
        peer = self._peer_for_notice(remote, now)
        if peer is not None:
            reference = Reference(remote.request_id, remote.generation)
            peer.to_hold.pop(reference, None)
            peer.to_release[reference] = now + self._config.handshake_timeout_s
            self._tell_waiting(peer, now)

    def hear(self, address: Address, message: Message, now: float) -> None:
        """Take a message that came over one line."""
        if not self._verifier.hear(address, message, now):
            self._apply(self._talk.hear(address, message, now), now)

    def fault(self, address: Address, reason: str, detail: str, now: float) -> None:
        """Take something from an address that is no message of ours."""
        self._apply(self._talk.fault(address, Failure(reason, f"{address}: {detail}")), now)

    def line_changed(self, address: Address, now: float, *, is_up: bool) -> None:
        """Take a connection's coming up or going down."""
        self._talk.line_changed(address, now, is_up=is_up)

    def tick(self, now: float) -> None:
        """Let time pass: talk, move bytes, end what has taken too long."""
        for peer in self._talk.tick(now):
            self._peer_changed(peer, now)
        for ended in self._carrier.pump(now):
            self._landed(ended, now)
        for read, failure in self._verifier.tick(now):
            self._fail(read, failure, now) if failure else self._succeed(read, now)
        for request_id in self._deadlines.expire(now):
            if request_id in self._reads:
                self._overdue(self._reads[request_id], now)
        if now >= self._sweep_at:
            self._sweep_at = now + self._config.heartbeat_s
            self._sweep(now)

    def next_deadline(self, now: float) -> float:
        """Return when ``tick`` has something to do."""
        if self._carrier.is_due:
            return now
        deadline = self._deadlines.next_deadline()
        sweep = self._sweep_at if self._book.peers else math.inf
        due = min(self._talk.next_due(), self._verifier.next_due(), sweep)
        return min(self._carrier.next_look(now), due, math.inf if deadline is None else deadline)

    def close(self, now: float) -> None:
        """Refuse new reads, fail those that run; they are reported as their writes end."""
        self._closing = True
        for read in list(self._reads.values()):
            if read.failure is None:
                self._fail(read, Failure("closing", "the session is shutting down"), now)

    def take_results(self) -> Results:
        """Return the reads that ended since the last call."""
        return self._reports.take()

    def gauges(self) -> dict[str, float]:
        """Return what is live, by the names of ``kvplan.session.stats``."""
        quarantined = sum(read.state is ReadState.DRAINING for read in self._reads.values())
        live = {"live_reads": len(self._reads), "live_peers": len(self._book.peers)}
        return live | {"quarantined_reads": quarantined} | self._carrier.gauges()

    def view(self, now: float) -> ReaderView:
        """Return what people see of the peers and reads."""
        return reader_view(self._book.peers.values(), self._reads.values(), now)

    def _peer(self, remote: RemoteRef, now: float) -> Peer:
        if self._closing:
            raise RefusedError("the session is shutting down", reason="closing")
        if len(self._reads) >= self._config.max_reads:
            raise OverloadedError(f"{len(self._reads)} reads are outstanding")
        return self._book.get(remote, now)

    def _peer_for_notice(self, remote: RemoteRef, now: float) -> Peer | None:
        """Return the peer to tell something about a reference, or None when it cannot or need not be told."""
        try:
            peer = self._book.get(remote, now)
        except KVPlanError as error:
            logger.info("nothing is said about request %s: %s", remote.request_id, error)
            return None
        return None if self._closing or peer.state is PeerState.GONE else peer

    def _tell_waiting(self, peer: Peer, now: float) -> None:
        """Hand over what waited for the peer's hello: references to hold and to release."""
        if peer.state is PeerState.ASKING or not self._book.may_talk_to(peer):
            return
        links = [self._talk.link(peer, rank) for rank in self._book.assigned_ranks(peer)]
        for reference, until in peer.to_hold.items():
            for link in links:
                link.hold(reference, until=until, now=now)
        for reference in peer.to_release:
            for link in links:
                link.release(reference)
        peer.to_hold.clear()
        peer.to_release.clear()

    def _apply(self, outcome: Outcome, now: float) -> None:
        for refusal in outcome.refusals:
            self._fail(refusal.source.read, refused_by(refusal), now)
        for peer in outcome.peers:
            self._peer_changed(peer, now)
        if outcome.link is not None:
            for source in list(outcome.link.sources.values()):
                self._settle(source.read, now)

    def _peer_changed(self, peer: Peer, now: float) -> None:
        self._tell_waiting(peer, now)
        for read in list(peer.reads):
            if peer.failure is not None and read.failure is None:
                self._fail(read, peer.failure, now)
            elif peer.state is PeerState.READY and read.state is ReadState.WAITING:
                self._begin(read, now)
        self._forget_if_over(peer)

    def _begin(self, read: Read, now: float) -> None:
        """Claim, then post: a refusal is never later than the bytes, because success waits for the grant."""
        read.step(ReadEvent.BEGIN)
        read.began_at = now
        self._deadlines.end(read.request_id)
        self._deadlines.extend(read.request_id, now + self._config.claim_timeout_s)
        peer = read.peer
        reference = Reference(read.request.remote.request_id, read.request.remote.generation)
        for link in peer.links.values():
            link.unhold(reference)
        for plan in peer.plans:
            key = ClaimKey(reference.request_id, reference.generation, read.request_id)
            device = Device.parse(peer.devices[plan.source_rank])
            read.sources.append(Source(read, self._talk.link(peer, plan.source_rank), key, device))
        try:
            for plan, source in zip(peer.plans, read.sources, strict=True):
                source.pieces = self._bound(plan, source)
        except (KVPlanError, MemoryError) as error:
            self._fail(read, failure_of(error), now)
            return
        self._post(read, now)

    def _bound(self, plan: PairPlan, source: Source) -> list[Piece]:
        peer, rank = source.read.peer, plan.source_rank
        if peer.hello is None:
            raise BindError(f"engine {peer.engine_id} is ready without a layout")
        name = peer.name_of(rank)
        if rank not in peer.connected:
            self._transport.connect(name, peer.hello.ranks[rank].metadata)
            peer.connected.add(rank)
        runs = bound_runs(plan, source.read.request, self._config)
        return pieces_of(source, name, route(runs, self._cost, peer.terms[rank]), self._config)

    def _post(self, read: Read, now: float) -> None:
        for source in read.sources:
            source.link.claim(source)
            source.note_arrival(now)
        reference = Reference(read.request.remote.request_id, read.request.remote.generation)
        for rank in self._book.assigned_ranks(read.peer):
            if not read.peer.readers[rank]:
                self._talk.link(read.peer, rank).release(reference)
        for link in read.peer.links.values():
            self._talk.speak(link, now)
        for source in read.sources:
            for piece in source.pieces:
                self._carrier.submit(piece)
        self._settle(read, now)

    def _landed(self, ended: Ended, now: float) -> None:
        piece = ended.piece
        read = piece.source.read
        if read.is_over:
            return
        if piece.state is PieceState.ARRIVED:
            piece.source.note_arrival(now)
        elif self._may_retry(ended):
            piece.num_failures += 1
            piece.step(PieceEvent.RETRY)
            self._stats.add("pieces_retried")
            self._carrier.submit(piece)
        else:
            reason = "peer_gone" if ended.peer_is_gone else "transport_error"
            self._fail(read, Failure(reason, f"reading from {piece.peer}: {ended.why}"), now)
            self._book.doubt(read.peer, now)
        self._settle(read, now)

    def _may_retry(self, ended: Ended) -> bool:
        piece, read, claim = ended.piece, ended.piece.source.read, ended.piece.source.claim
        wanted = read.state is ReadState.READING and read.peer.state is not PeerState.GONE and not ended.peer_is_gone
        return wanted and claim is not ClaimState.REFUSED and piece.num_failures < self._config.read_retries

    def _settle(self, read: Read, now: float) -> None:
        """Report a read that is over: all is here and proven, or it has failed and no write is outstanding."""
        if read.state is ReadState.DRAINING and not read.is_written:
            read.step(ReadEvent.DRAINED)
            self._end(read, ok=False)
        elif read.state is ReadState.READING and read.is_complete:
            late = read.uncovered(self._config.lease_margin_s)
            for source in late:
                source.link.renew_since(source.arrived_at or now, now)
            if not late and self._verifier.wants(read.request_id):
                read.step(ReadEvent.VERIFY)
                self._verifier.begin(read, now)
            elif not late:
                self._succeed(read, now)

    def _succeed(self, read: Read, now: float) -> None:
        read.step(ReadEvent.SUCCEED)
        self._reports.succeeded(read, now)
        self._end(read, ok=True)

    def _fail(self, read: Read, failure: Failure, now: float) -> None:
        """Mark a read as failed; it is reported at once, or when its last write has ended."""
        if read.failure is not None or read.is_over:
            return
        read.failure = failure
        read.step(ReadEvent.FAIL)
        for piece in read.pieces():
            if piece.state is PieceState.WAITING:
                piece.step(PieceEvent.DROP)
        self._settle(read, now)

    def _end(self, read: Read, *, ok: bool) -> None:
        for source in read.sources:
            source.link.end(source, ok=ok)
        del self._reads[read.request_id]
        self._deadlines.end(read.request_id)
        self._verifier.drop(read)
        read.peer.reads.pop(read, None)
        if read.failure is not None:
            self._reports.failed(read.request, read.failure)
        self._forget_if_over(read.peer)

    def _overdue(self, read: Read, now: float) -> None:
        """End a read whose time for its present stage is over."""
        ends_at, last = read.began_at + self._config.transfer_timeout_s, self._book.desks.last_answer(read.peer.desk)
        failure = overdue(read, now, ends_at=ends_at, last_answer=last, knows_own=self._book.own is not None)
        if failure:
            self._fail(read, failure, now)
        elif read.state is ReadState.READING:
            self._deadlines.extend(read.request_id, ends_at)

    def _sweep(self, now: float) -> None:
        """Forget peers that nobody wants and that have heard everything, and what waited too long for one."""
        for peer in list(self._book.peers.values()):
            peer.drop_late_notices(now)
            idle_s = 0.0 if peer.state is PeerState.ASKING else self._config.peer_idle_s
            spare_s = 0.0 if all(link.is_idle for link in peer.links.values()) else self._config.hold_s
            if peer.used_at + idle_s + spare_s <= now and not peer.is_wanted:
                self._forget(peer)

    def _forget_if_over(self, peer: Peer) -> None:
        if peer.state is PeerState.GONE and not peer.reads:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        for rank in peer.connected:
            self._carrier.disconnect(peer.name_of(rank))
        peer.connected.clear()
        self._talk.drop(peer)
