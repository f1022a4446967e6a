"""Conversation: all talk of a consumer rank with front desks and producer ranks. No reads, no bytes, no sockets.

What is due is said in ``tick``; what arrives changes peers and links, and comes out as an ``Outcome`` for whoever
decides about reads. A line that is lost makes its peer suspect, and its link begin anew.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

from kvplan.session.lifecycle import PeerState
from kvplan.session.nouns import Failure
from kvplan.session.peers import PeerBook
from kvplan.wire.messages import Error, Hello, HelloRefused, HelloRequest, NotReady

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.session.config import Identity, SessionConfig
    from kvplan.session.link import Link, Refusal
    from kvplan.session.peers import Peer
    from kvplan.session.stats import Stats
    from kvplan.wire.addresses import Address
    from kvplan.wire.messages import Message

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What a message changed."""

    peers: tuple[Peer, ...] = ()
    """Peers that became ready, refused or gone."""
    refusals: tuple[Refusal, ...] = ()
    link: Link | None = None
    """The link whose claims may have been granted or renewed."""


class Conversation:
    """Desks, links and the peers behind them."""

    def __init__(
        self,
        *,
        identity: Identity,
        config: SessionConfig,
        stats: Stats,
        transport: str,
        send: Callable[[Address, Message], object],
        hang_up: Callable[[Address], object],
    ) -> None:
        self._me = identity.engine_id
        self._stats = stats
        self._send = send
        self._hang_up = hang_up
        self._lines: dict[Address, tuple[Peer, Link]] = {}
        self._asked: set[Address] = set()
        self.book = PeerBook(identity=identity, config=config, stats=stats, transport=transport)

    def link(self, peer: Peer, rank: int) -> Link:
        """Return the link to a peer's rank; a peer that had the same address before it cannot be there any more."""
        link = self.book.link(peer, rank)
        held = self._lines.get(link.address)
        if held is not None and held[0] is not peer and held[0].state in {PeerState.READY, PeerState.SUSPECT}:
            held[0].doubted_at = -math.inf
            self.book.doubt(held[0], -math.inf)
        self._lines[link.address] = (peer, link)
        return link

    def speak(self, link: Link, now: float) -> None:
        """Say at once what is due on a link."""
        for message in link.due(now):
            self._send(link.address, message)

    def drop(self, peer: Peer) -> None:
        """Forget a peer and hang up its lines."""
        self.book.forget(peer)
        for address, (owner, _) in list(self._lines.items()):
            if owner is peer:
                del self._lines[address]
                self._hang_up(address)

    def hear(self, address: Address, message: Message, now: float) -> Outcome:
        """Take a message that came over one line."""
        match message:
            case Hello():
                return Outcome(self._heard(address, message, now))
            case NotReady():
                self.book.desks.retry(address, f"not ready: {message.detail}", now)
                return Outcome()
            case HelloRefused():
                return self.fault(address, Failure("handshake_failed", f"{message.reason}: {message.detail}"))
            case Error():
                logger.warning("%s answers: %s: %s", address, message.reason, message.detail)
                return Outcome()
        peer, link = self._lines.get(address, (None, None))
        if peer is None or link is None:
            self._stats.add("unexpected_messages")
            return Outcome()
        refusals = tuple(link.handle(message, now))
        return Outcome(self._unwelcome(peer, link), refusals, link)

    def fault(self, address: Address, failure: Failure) -> Outcome:
        """Take a final no, or something that is no message, from an address."""
        if address in self.book.desks:
            return Outcome(tuple(self.book.refuse_all(address, failure)))
        return Outcome()

    def line_changed(self, address: Address, now: float, *, is_up: bool) -> None:
        """Take a connection's coming up or going down."""
        if is_up:
            return
        self.book.desks.retry(address, "no connection (nobody listens, or the keys differ)", now)
        peer, link = self._lines.get(address, (None, None))
        if peer is not None and link is not None and peer.state is not PeerState.GONE:
            link.reset(now)
            self.book.doubt(peer, now)

    def tick(self, now: float) -> list[Peer]:
        """Say everything that is due; return the peers that time has ended."""
        gone = self.book.overdue(now)
        self._ask(now)
        for peer, link in list(self._lines.values()):
            if peer.state is not PeerState.GONE and link.next_due() <= now:
                self.speak(link, now)
        return gone

    def next_due(self) -> float:
        """Return when ``tick`` has something to do."""
        links = (link.next_due() for peer, link in self._lines.values() if peer.state is not PeerState.GONE)
        return min(self.book.desks.next_due(), self.book.next_overdue(), *links)

    @property
    def is_quiet(self) -> bool:
        """Whether no claim, done or release waits for an answer."""
        return all(link.is_idle for peer, link in self._lines.values() if peer.state is PeerState.READY)

    def _heard(self, address: Address, hello: Hello, now: float) -> tuple[Peer, ...]:
        changed = tuple(self.book.hear(address, hello))
        for peer in changed:
            if peer.state is PeerState.READY:
                self._stats.observe("handshake_seconds", now - peer.asked_at)
        return changed

    def _ask(self, now: float) -> None:
        """Ask the desks that are due, each over a new connection; hang up on those that nobody asks any more."""
        for address in [a for a in self._asked if a not in self.book.desks]:
            self._asked.discard(address)
            if address not in self._lines:
                self._hang_up(address)
        for address in self.book.desks.due(now):
            if address in self._asked and address not in self._lines:
                self._hang_up(address)
            self._asked.add(address)
            self._send(address, HelloRequest(engine_id=self._me))

    def _unwelcome(self, peer: Peer, link: Link) -> tuple[Peer, ...]:
        """End a peer one of whose ranks does not want to know us."""
        if link.refusal is None or peer.state not in {PeerState.READY, PeerState.SUSPECT}:
            return ()
        reason, detail = link.refusal
        reason = reason if reason == "engine_restarted" else "incompatible"
        self.book.vanish(peer, Failure(reason, f"rank {link.them.rank} of engine {peer.engine_id}: {detail}"))
        return (peer,)
