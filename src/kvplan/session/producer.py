"""Producer: one rank's answers to its readers. Messages and times in, messages out; no threads, no transport.

1. A reading engine introduces itself with its layout; the election over both layouts says which of its ranks read here.
2. A claim of an offer that is not known yet waits a bounded time: the offer may be one engine step behind.
   A done or a release that comes before its offer is kept for as long, and applied when the offer comes.
3. Every answer goes back along the route that the question came from. Time passes only through ``tick``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvplan.errors import PlanError, WireError
from kvplan.planner import elect
from kvplan.session.digest_desk import DigestDesk
from kvplan.session.offers import OfferBook, OfferKey
from kvplan.session.salt import election_salt
from kvplan.session.worker import AT_ONCE
from kvplan.wire.digests import Digest
from kvplan.wire.fingerprint import layout_digest
from kvplan.wire.layouts import from_body
from kvplan.wire.messages import (
    Claim,
    ClaimItem,
    Done,
    DoneAck,
    DoneItem,
    Granted,
    GrantItem,
    Introduce,
    Introduced,
    IntroduceRefused,
    Party,
    Reference,
    RefusalItem,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvplan.planner import Election, EngineLayout
    from kvplan.session.config import Identity, SessionConfig
    from kvplan.session.nouns import Offer
    from kvplan.session.stats import Stats
    from kvplan.session.worker import Hands
    from kvplan.wire.messages import Message

NO_READERS: frozenset[int] = frozenset()


class Answer(NamedTuple):
    """A message and where it goes."""

    route: bytes
    message: Message


class _Known(NamedTuple):
    """A reading engine that has introduced itself."""

    digest: str
    """Of its layout, which never changes while its id lives."""
    layout: EngineLayout
    election: Election


class _Parked(NamedTuple):
    """Something about an offer that is not known yet."""

    route: bytes
    reader: Party
    item: ClaimItem | DoneItem | Reference
    until: float


class Producer:
    """The producer's side of one rank."""

    def __init__(self, *, identity: Identity, config: SessionConfig, stats: Stats, hands: Hands = AT_ONCE) -> None:
        self._identity = identity
        self._config = config
        self._stats = stats
        self._own: EngineLayout | None = None
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._parked: OrderedDict[tuple[OfferKey, Party, type, str], _Parked] = OrderedDict()
        self._closing = False
        self.offers = OfferBook(config=config, stats=stats)
        self._digests = DigestDesk(identity=identity, config=config, offers=self.offers, stats=stats, hands=hands)

    def learn_own(self, layout: EngineLayout) -> None:
        """Take the layout of the whole engine that this rank belongs to."""
        self._own = layout

    def offer(self, offer: Offer, now: float) -> list[Answer]:
        """Keep an offer; return answers to what waited for it."""
        self.offers.expire(now)
        self.offers.add(offer, now)
        key = OfferKey(offer.request_id, offer.generation)
        waiting = [parked for (about, *_), parked in self._parked.items() if about.request_id == key.request_id]
        return [answer for parked in waiting for answer in self._unpark(parked, now)]

    def withdraw(self, request_id: str) -> None:
        """Let no new reader into a request's offers."""
        self.offers.shut_request(request_id, "withdrawn")

    def close(self) -> None:
        """Refuse every new claim from now on."""
        self._closing = True

    def handle(self, route: bytes, message: Message, now: float) -> list[Answer]:
        """Return the answers to one message."""
        self.offers.expire(now)
        match message:
            case Introduce():
                return [Answer(route, self._introduce(message))]
            case Claim():
                return _bundled(route, message.reader, self._claims(route, message, now))
            case Renew():
                return [Answer(route, self._renew(message, now))]
            case Done():
                answer: Message = self._done(route, message, now)
            case Release():
                answer = self._release(route, message, now)
            case Digest():
                return [Answer(*reply) for reply in (*self._digests.ask(route, message), *self._digests.replies())]
            case _:
                self._stats.add("unexpected_messages")
                return []
        return [Answer(route, answer)]

    def tick(self, now: float) -> list[Answer]:
        """Let time pass: end leases, refuse claims that have waited long enough; send digests that are ready."""
        self.offers.expire(now)
        answers = [Answer(*reply) for reply in self._digests.replies()]
        while self._parked:
            key, parked = next(iter(self._parked.items()))
            if parked.until > now:
                break
            del self._parked[key]
            if isinstance(parked.item, ClaimItem):
                self._stats.add("stale_references")
                answers.extend(_bundled(parked.route, parked.reader, [self._refused(parked.item, "unknown")]))
        return answers

    def next_deadline(self) -> float | None:
        """Return when ``tick`` has something to do."""
        parked = next(iter(self._parked.values())).until if self._parked else None
        times = [time for time in (parked, self.offers.next_deadline()) if time is not None]
        return min(times) if times else None

    @property
    def num_parked(self) -> int:
        """Claims and notices that wait for their offer."""
        return len(self._parked)

    def _introduce(self, message: Introduce) -> Introduced | IntroduceRefused:
        me = Party(self._identity.engine_id, self._identity.rank)
        if message.producer != me:
            detail = f"rank {me.rank} of engine {me.engine_id} answers here"
            return _unwelcome(message, "engine_restarted", detail)
        if self._own is None:
            return _unwelcome(message, "not_ready", "this rank does not know its own engine's layout yet")
        digest = layout_digest(message.layout)
        known = self._known.get(message.engine_id)
        if known is not None and known.digest != digest:
            return _unwelcome(message, "incompatible", "an engine of that id is known here with another layout")
        if known is None:
            try:
                reading = from_body(message.engine_id, message.layout)
                known = _Known(digest, reading, elect(self._own, reading, salt=election_salt(message.engine_id)))
            except (WireError, PlanError, MemoryError) as error:
                return _unwelcome(message, "incompatible", str(error)[:4000])
        self._known[message.engine_id] = known
        self._known.move_to_end(message.engine_id)
        self._digests.know(self._own, known.layout, known.election)
        while len(self._known) > self._config.max_peers:
            self._known.popitem(last=False)
        return Introduced(producer=me, engine_id=message.engine_id)

    def _readers(self, engine_id: str) -> frozenset[int] | None:
        """Return which ranks of an engine read from this one; None when it has not introduced itself."""
        known = self._known.get(engine_id)
        return frozenset(known.election.readers[self._identity.rank]) if known else None

    def _claims(self, route: bytes, message: Claim, now: float) -> Iterable[GrantItem | RefusalItem]:
        for item in message.items:
            answer = self._claim(route, message.reader, item, now)
            if answer is not None:
                yield answer

    def _claim(self, route: bytes, reader: Party, item: ClaimItem, now: float) -> GrantItem | RefusalItem | None:
        readers = self._readers(reader.engine_id)
        if readers is None:
            return _refuse(item, "not_introduced")
        key = OfferKey(item.request_id, item.generation)
        if key in self.offers.live():
            if self._closing:
                return self._refused(item, "closing")
        elif not self.offers.why_not(key):
            return None if self._park(route, reader, item, now) else self._refused(item, "overloaded")
        return self.offers.claim(reader, item, readers, now)

    def _refused(self, item: ClaimItem, reason: str) -> RefusalItem:
        self._stats.refuse(reason)
        return _refuse(item, reason)

    def _renew(self, message: Renew, now: float) -> Renewed:
        answers = [self.offers.renew(message.reader.engine_id, item, now) for item in message.items]
        return Renewed(
            reader=message.reader,
            number=message.number,
            items=tuple(answer for answer in answers if isinstance(answer, GrantItem)),
            lost=tuple(answer for answer in answers if isinstance(answer, RefusalItem)),
        )

    def _done(self, route: bytes, message: Done, now: float) -> DoneAck:
        for item in message.items:
            if self._may_come(item):
                self._park(route, message.reader, item, now)
            else:
                self.offers.done(message.reader, item, self._readers(message.reader.engine_id) or NO_READERS)
        return DoneAck(reader=message.reader, items=message.items)

    def _release(self, route: bytes, message: Release, now: float) -> Released:
        for item in message.items:
            if self._may_come(item):
                self._park(route, message.reader, item, now)
            else:
                self.offers.release(message.reader.engine_id, item)
        return Released(reader=message.reader, items=message.items)

    def _may_come(self, item: DoneItem | Reference) -> bool:
        key = OfferKey(item.request_id, item.generation)
        return key not in self.offers.live() and not self.offers.why_not(key)

    def _park(self, route: bytes, reader: Party, item: ClaimItem | DoneItem | Reference, now: float) -> bool:
        """Keep an item until its offer comes; return whether there was room. A repetition keeps the first's time."""
        name = (OfferKey(item.request_id, item.generation), reader, type(item), getattr(item, "ticket", ""))
        held = self._parked.get(name)
        if held is None and len(self._parked) >= self._config.max_parked:
            self._stats.add("overloads")
            return False
        self._parked[name] = _Parked(route, reader, item, held.until if held else now + self._config.claim_park_s)
        return True

    def _unpark(self, parked: _Parked, now: float) -> list[Answer]:
        item = parked.item
        key = OfferKey(item.request_id, item.generation)
        self._parked.pop((key, parked.reader, type(item), getattr(item, "ticket", "")), None)
        readers = self._readers(parked.reader.engine_id) or NO_READERS
        if isinstance(item, ClaimItem):
            answer = self._claim(parked.route, parked.reader, item, now)
            return _bundled(parked.route, parked.reader, [answer] if answer else [])
        if isinstance(item, DoneItem):
            self.offers.done(parked.reader, item, readers)
        else:
            self.offers.release(parked.reader.engine_id, item)
        return []


def _refuse(item: ClaimItem, reason: str) -> RefusalItem:
    return RefusalItem(item.request_id, item.generation, reason, ticket=item.ticket)


def _unwelcome(message: Introduce, reason: str, detail: str) -> IntroduceRefused:
    return IntroduceRefused(producer=message.producer, engine_id=message.engine_id, reason=reason, detail=detail)


def _bundled(route: bytes, reader: Party, answers: Iterable[GrantItem | RefusalItem]) -> list[Answer]:
    """Return at most two messages that carry every answer."""
    items: Sequence[GrantItem | RefusalItem] = list(answers)
    granted = tuple(item for item in items if isinstance(item, GrantItem))
    refused = tuple(item for item in items if isinstance(item, RefusalItem))
    messages: list[Message] = []
    if granted:
        messages.append(Granted(reader=reader, items=granted))
    if refused:
        messages.append(Refused(reader=reader, items=refused))
    return [Answer(route, message) for message in messages]
