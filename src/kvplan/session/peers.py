"""Peers: remote engines that reads are made from; first contact, verdict, plan, doubt and end. No requests, no bytes.

1. A peer is named by its engine id, new at every start. Its front desk's address may serve a successor some day.
2. The hello is compared by field, its layout validated, the plan generated and proved: once, for the peer's life.
3. A lost connection makes a peer suspect. The front desk is asked again: the same id clears it, another id or
   silence ends it.
4. Our own engine's layout comes the same way, from our own front desk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvplan.errors import CompatibilityError, KVPlanError, OverloadedError, PlanError, RefusedError, WireError
from kvplan.planner import elect, plan_rank
from kvplan.session.binding import check_devices, staging_terms
from kvplan.session.desks import Desks
from kvplan.session.lifecycle import PEER, PeerEvent, PeerState, advance
from kvplan.session.link import Link
from kvplan.session.nouns import Failure
from kvplan.session.salt import election_salt
from kvplan.wire.addresses import check_advertised, checked_address, is_allowed, parse_address
from kvplan.wire.compatibility import require_compatible
from kvplan.wire.layouts import from_body, to_body
from kvplan.wire.messages import Party

if TYPE_CHECKING:
    from kvplan.planner import EngineLayout, PairPlan
    from kvplan.session.config import Identity, SessionConfig
    from kvplan.session.nouns import RemoteRef
    from kvplan.session.reads import Read
    from kvplan.session.routing import Terms
    from kvplan.session.stats import Stats
    from kvplan.wire.addresses import Address
    from kvplan.wire.messages import Hello, LayoutBody, Reference


@dataclass(slots=True, eq=False)
class Peer:
    """One remote engine."""

    engine_id: str
    desk: Address
    used_at: float
    state: PeerState = PeerState.ASKING
    failure: Failure | None = None
    """Why it must not be read from, or is gone."""
    hello: Hello | None = None
    layout: EngineLayout | None = None
    plans: tuple[PairPlan, ...] = ()
    """What this rank reads, per producer rank."""
    terms: dict[int, Terms] = field(default_factory=dict)
    """What may be staged, by producer rank that is read from."""
    devices: tuple[str, ...] = ()
    """Per producer rank, where its cache lies."""
    readers: tuple[tuple[int, ...], ...] = ()
    """Per producer rank, which of our ranks read from it."""
    links: dict[int, Link] = field(default_factory=dict)
    """By producer rank, made when first needed."""
    connected: set[int] = field(default_factory=set)
    """Producer ranks that the transport knows."""
    reads: dict[Read, None] = field(default_factory=dict)
    """Reads that are not over, in the order of their requests: the same on every rank."""
    to_release: dict[Reference, float] = field(default_factory=dict)
    """References to release, and to hold, once it is known whom to tell; with the time until which that makes sense."""
    to_hold: dict[Reference, float] = field(default_factory=dict)
    doubted_at: float = math.inf
    asked_at: float = 0.0
    """When its hello was first wanted."""

    def step(self, event: PeerEvent) -> None:
        """Advance the state."""
        self.state = advance(PEER, self.state, event)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it to become ready."""
        return bool(self.reads or self.to_release or self.to_hold)

    def drop_late_notices(self, now: float) -> None:
        """Forget what has waited too long for the peer to be known."""
        for waiting in (self.to_hold, self.to_release):
            for reference in [r for r, until in waiting.items() if until <= now]:
                del waiting[reference]

    def name_of(self, rank: int) -> str:
        """Return the name of one of its ranks for the transport."""
        return f"{self.engine_id}/{rank}"


class PeerBook:
    """Every peer of one rank, and what the rank knows about its own engine."""

    def __init__(self, *, identity: Identity, config: SessionConfig, stats: Stats, transport: str) -> None:
        self._identity = identity
        self._config = config
        self._stats = stats
        self._transport = transport
        self._own_desk: Address | None = None
        self._introduction: LayoutBody | None = None
        self.own: EngineLayout | None = None
        self.desks = Desks(config)
        self.peers: dict[str, Peer] = {}

    def set_own_desk(self, address: Address) -> None:
        """Say where our own engine's hello is to be had."""
        self._own_desk = address
        if self.own is None:
            self.desks.want(address)

    def get(self, remote: RemoteRef, now: float) -> Peer:
        """Return the peer that a reference names, asking for its hello when it is new.

        Raises ``WireError`` for an address that cannot be meant, ``RefusedError`` for one that is not allowed,
        ``OverloadedError`` when there is no room.
        """
        address = checked_address(remote.host, remote.port)
        peer = self.peers.get(remote.engine_id)
        if peer is None:
            if not is_allowed(remote.host, self._config.allowed_peers):
                raise RefusedError(f"{remote.host} is not on the allow list", reason="peer_not_allowed")
            if len(self.peers) >= self._config.max_peers:
                raise OverloadedError(f"{len(self.peers)} peers are known and none of them is idle")
            peer = self.peers[remote.engine_id] = Peer(remote.engine_id, address, now, asked_at=now)
            self.desks.want(peer.desk)
        peer.used_at = now
        return peer

    def hear(self, address: Address, hello: Hello) -> list[Peer]:
        """Take a hello; return the peers whose state it changed."""
        if address == self._own_desk and self.own is None and self._learn_own(address, hello):
            return [*self._decide_all(), *self._hear(address, hello)]
        return self._hear(address, hello)

    def refuse_all(self, address: Address, failure: Failure) -> list[Peer]:
        """Take a final no from a front desk; return the peers that it refuses."""
        asking = [p for p in self.peers.values() if p.desk == address and p.state is PeerState.ASKING]
        for peer in asking:
            self._refuse(peer, failure)
        self._settle_desk(address)
        return asking

    def doubt(self, peer: Peer, now: float) -> None:
        """Note that a connection to a peer's rank was lost."""
        if peer.state is PeerState.READY:
            peer.step(PeerEvent.DOUBT)
            peer.doubted_at = now
            self.desks.want(peer.desk)

    def overdue(self, now: float) -> list[Peer]:
        """End and return the suspects that have not answered in time."""
        limit = now - self._config.hello_timeout_s
        gone = [p for p in self.peers.values() if p.state is PeerState.SUSPECT and p.doubted_at <= limit]
        for peer in gone:
            self.vanish(peer, Failure("peer_gone", f"engine {peer.engine_id} at {peer.desk} does not answer any more"))
        return gone

    def next_overdue(self) -> float:
        """Return when the next suspect's time is over; infinite when there is none."""
        doubts = [peer.doubted_at for peer in self.peers.values() if peer.state is PeerState.SUSPECT]
        return min(doubts, default=math.inf) + self._config.hello_timeout_s

    def vanish(self, peer: Peer, failure: Failure) -> None:
        """End a peer; it is forgotten when its last read is over."""
        peer.step(PeerEvent.VANISH)
        peer.failure = failure
        self._settle_desk(peer.desk)

    def forget(self, peer: Peer) -> None:
        """Drop a peer that has ended, or that nobody wants."""
        self.peers.pop(peer.engine_id, None)
        self._settle_desk(peer.desk)

    def link(self, peer: Peer, rank: int) -> Link:
        """Return the link to one rank of a peer whose hello is known."""
        link = peer.links.get(rank)
        if link is None:
            if peer.hello is None or self._introduction is None:
                raise OverloadedError(f"engine {peer.engine_id} is not known well enough for a link")
            link = peer.links[rank] = Link(
                me=Party(self._identity.engine_id, self._identity.rank),
                them=Party(peer.engine_id, rank),
                address=parse_address(peer.hello.ranks[rank].control_address),
                introduction=self._introduction,
                config=self._config,
                stats=self._stats,
            )
        return link

    def may_talk_to(self, peer: Peer) -> bool:
        """Return whether the addresses of a peer's ranks are known and good, though its cache may not fit ours."""
        refused = peer.failure is not None and peer.failure.reason != "incompatible"
        return peer.hello is not None and self._introduction is not None and not refused

    def assigned_ranks(self, peer: Peer) -> range:
        """Return the producer ranks that this rank, of all ranks of its engine, tells what concerns them all."""
        count = len(peer.hello.ranks) if peer.hello else 0
        return range(self._identity.rank, count, self._identity.num_ranks)

    def _learn_own(self, address: Address, hello: Hello) -> bool:
        if hello.engine_id != self._identity.engine_id:
            return False
        try:
            self.own = from_body(hello.engine_id, hello.layout)
        except KVPlanError:
            self._stats.add("loop_errors")
            return False
        self._introduction = to_body(self.own)
        self._settle_desk(address)
        return True

    def _hear(self, address: Address, hello: Hello) -> list[Peer]:
        changed = []
        for peer in [p for p in self.peers.values() if p.desk == address]:
            if peer.engine_id != hello.engine_id:
                if peer.state in {PeerState.ASKING, PeerState.READY, PeerState.SUSPECT}:
                    self.vanish(peer, _replaced(peer, hello))
                    changed.append(peer)
            elif peer.state is PeerState.SUSPECT:
                peer.step(PeerEvent.HELLO)
                peer.doubted_at = math.inf
            elif peer.state is PeerState.ASKING:
                peer.hello = hello
                changed += self._decide(peer)
        self._settle_desk(address)
        return changed

    def _decide_all(self) -> list[Peer]:
        return [p for peer in list(self.peers.values()) for p in self._decide(peer)]

    def _decide(self, peer: Peer) -> list[Peer]:
        """Plan a peer whose hello is here, or refuse it; return it if it was decided."""
        if peer.state is not PeerState.ASKING or peer.hello is None or self.own is None:
            return []
        try:
            self._plan(peer, peer.hello, self.own)
        except (CompatibilityError, PlanError) as error:
            self._refuse(peer, Failure("incompatible", str(error)))
        except (KVPlanError, MemoryError) as error:
            self._refuse(peer, Failure("handshake_failed", f"engine {peer.engine_id} at {peer.desk}: {error}"))
        else:
            self._stats.add("handshakes")
            peer.step(PeerEvent.HELLO)
        self._settle_desk(peer.desk)
        return [peer]

    def _plan(self, peer: Peer, hello: Hello, own: EngineLayout) -> None:
        if len(hello.ranks) != len(hello.layout.ranks):
            raise WireError(f"the hello names {len(hello.ranks)} ranks and lays out {len(hello.layout.ranks)}")
        for card in hello.ranks:
            control = parse_address(card.control_address)
            check_advertised(control, reached=peer.desk.host)
            if not is_allowed(control.host, self._config.allowed_peers):
                raise WireError(f"{control.host} is not on the allow list")
        require_compatible(
            {**self._identity.compatibility, "transport": self._transport},
            {**hello.compatibility, "transport": hello.ranks[0].transport},
        )
        peer.layout = from_body(hello.engine_id, hello.layout)
        election = elect(peer.layout, own, salt=election_salt(own.engine_id))
        peer.plans = plan_rank(peer.layout, own, self._identity.rank, election=election)
        peer.devices = tuple(check_devices(rank) for rank in peer.layout.ranks)
        remote, local = peer.layout.ranks, own.ranks[self._identity.rank]
        peer.terms = {p.source_rank: staging_terms(remote[p.source_rank], local, self._config) for p in peer.plans}
        peer.readers = election.readers

    def _refuse(self, peer: Peer, failure: Failure) -> None:
        self._stats.add("handshakes_refused")
        peer.failure = failure
        peer.step(PeerEvent.REFUSE)

    def _settle_desk(self, address: Address) -> None:
        """Stop asking at an address when nobody waits for its answer."""
        asking = {PeerState.ASKING, PeerState.SUSPECT}
        waiting = any(
            p.desk == address and p.state in asking and not (p.state is PeerState.ASKING and p.hello is not None)
            for p in self.peers.values()
        )
        if not waiting and not (self.own is None and address == self._own_desk):
            self.desks.unwant(address)


def _replaced(peer: Peer, hello: Hello) -> Failure:
    detail = f"engine {hello.engine_id} answers at {peer.desk}; engine {peer.engine_id} is not there any more"
    return Failure("engine_restarted", detail)
