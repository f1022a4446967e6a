"""Link: the control conversation with one rank of a peer. What to say and when; no sockets, no transport.

1. Nothing but a release is said before the rank knows us (``Introduce``), and after every lost connection anew.
2. Claims and notices (done, release) are repeated until they are answered; all that is due goes in one message each.
3. One renewal per heartbeat carries every request that is read or waits here. Answers state leases, which count from
   when the question was *sent*.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvplan.session.lifecycle import LINK, ClaimEvent, ClaimState, LinkEvent, LinkState, advance
from kvplan.session.reads import ClaimKey
from kvplan.wire.fields import MAX_ITEMS
from kvplan.wire.messages import (
    Claim,
    ClaimItem,
    Done,
    DoneAck,
    DoneItem,
    Granted,
    Introduce,
    Introduced,
    IntroduceRefused,
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

    from kvplan.session.config import SessionConfig
    from kvplan.session.reads import Source
    from kvplan.session.stats import Stats
    from kvplan.wire.addresses import Address
    from kvplan.wire.messages import LayoutBody, Message, Party

T = TypeVar("T")

MAX_RENEWALS = 16
"""Unanswered renewals whose sending times are remembered."""


class Refusal(NamedTuple):
    """A source that must not be believed, and why."""

    source: Source
    reason: str
    detail: str


@dataclass(slots=True)
class _Notice:
    """A done or release that is repeated until answered."""

    item: DoneItem | Reference
    next_at: float = -math.inf
    num_sent: int = 0


@dataclass(slots=True, eq=False)
class Link:
    """One rank of a peer, as a reader sees it."""

    me: Party
    them: Party
    address: Address
    introduction: LayoutBody
    """Layout of the engine that we are."""
    config: SessionConfig
    stats: Stats
    state: LinkState = LinkState.NEW
    sources: dict[ClaimKey, Source] = field(default_factory=dict)
    """Claims that are not ended."""
    held: dict[Reference, float] = field(default_factory=dict)
    """References that wait here, and until when they are renewed."""
    refusal: tuple[str, str] | None = None
    """Reason and detail when the rank does not want to know us."""
    _notices: OrderedDict[ClaimKey, _Notice] = field(default_factory=OrderedDict)
    _asked: dict[ClaimKey, float] = field(default_factory=dict)
    """When each unanswered claim is to be sent again."""
    _renewals: OrderedDict[int, float] = field(default_factory=OrderedDict)
    _number: int = 0
    _heartbeat_at: float = math.inf
    _renewed_at: float = -math.inf
    _introduce_at: float = -math.inf

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to say and nothing to wait for."""
        return not (self.sources or self.held or self._notices)

    def claim(self, source: Source) -> None:
        """Take a new claim; it is sent by the next ``due``."""
        self.sources[source.key] = source
        self._asked[source.key] = -math.inf

    def hold(self, reference: Reference, *, until: float, now: float) -> None:
        """Renew a reference that waits here, until then; the first renewal is sent at once."""
        if reference not in self.held:
            self._heartbeat_at = now
        self.held[reference] = until

    def unhold(self, reference: Reference) -> None:
        """Stop renewing a reference that waited here."""
        self.held.pop(reference, None)

    def end(self, source: Source, *, ok: bool) -> None:
        """Tell the rank that a claim's reader is done; a refused one has nothing to tell."""
        self.sources.pop(source.key, None)
        self._asked.pop(source.key, None)
        if source.step(ClaimEvent.END):
            self._notices[source.key] = _Notice(DoneItem(*source.key, ok))

    def release(self, reference: Reference) -> None:
        """Tell the rank that nobody here will read; again is the same."""
        self.unhold(reference)
        self._notices.setdefault(ClaimKey(*_pair(reference), ""), _Notice(reference))

    def renew_since(self, then: float, now: float) -> None:
        """Send the next renewal at once, unless one has been sent at ``then`` or later."""
        if self._renewed_at < then:
            self._heartbeat_at = min(self._heartbeat_at, now)

    def reset(self, now: float) -> None:
        """Begin anew, soon: the connection was lost, or the rank has forgotten us."""
        self.state = advance(LINK, self.state, LinkEvent.RESET)
        self._introduce_at = now + self.config.backoff_s
        for key in self._asked:
            self._asked[key] = self._introduce_at
        for notice in self._notices.values():
            notice.next_at = self._introduce_at

    def due(self, now: float) -> list[Message]:
        """Return what is to be sent now."""
        messages: list[Message] = [*self._releases(now)]
        if self.state is LinkState.READY:
            messages += [*self._claims(now), *self._dones(now), *self._heartbeat(now)]
        elif not self.is_idle and self._introduce_at <= now:
            self.state = advance(LINK, self.state, LinkEvent.INTRODUCE)
            self._introduce_at = now + self.config.resend_s
            body = self.introduction
            messages.append(Introduce(producer=self.them, engine_id=self.me.engine_id, layout=body))
        return messages

    def next_due(self) -> float:
        """Return when ``due`` has something to send; infinite when only an answer can change that."""
        if self.is_idle:
            return math.inf
        times = [notice.next_at for notice in self._notices.values() if self._may_send(notice)]
        if self.state is LinkState.READY:
            times += [self._heartbeat_at if self.sources or self.held else math.inf, *self._asked.values()]
        else:
            times.append(self._introduce_at)
        return min(times, default=math.inf)

    def handle(self, message: Message, now: float) -> list[Refusal]:
        """Take an answer of the rank; return the sources that it refuses."""
        match message:
            case Introduced(producer=self.them, engine_id=self.me.engine_id):
                self._welcome(now)
            case IntroduceRefused(producer=self.them, engine_id=self.me.engine_id):
                self._unwelcome(message, now)
            case Granted(reader=self.me):
                self._granted(message, now)
            case Refused(reader=self.me):
                return self._refused(message.items, now)
            case Renewed(reader=self.me):
                return self._renewed(message)
            case DoneAck(reader=self.me) | Released(reader=self.me):
                self._acknowledged(message)
            case _:
                self.stats.add("unexpected_messages")
        return []

    def _may_send(self, notice: _Notice) -> bool:
        return self.state is LinkState.READY or isinstance(notice.item, Reference)

    def _welcome(self, now: float) -> None:
        if self.state is not LinkState.INTRODUCING:
            self.stats.add("unexpected_messages")
            return
        self.state = advance(LINK, self.state, LinkEvent.WELCOME)
        self._heartbeat_at = now if self.held else now + self.config.heartbeat_s

    def _unwelcome(self, message: IntroduceRefused, now: float) -> None:
        if message.reason == "not_ready":
            self._introduce_at = min(self._introduce_at, now + self.config.backoff_s)
        else:
            self.refusal = (message.reason, message.detail)

    def _claims(self, now: float) -> list[Claim]:
        due = [key for key, at in self._asked.items() if at <= now]
        items = []
        for key in due:
            self._asked[key] = now + self.config.resend_s
            source = self.sources[key]
            source.asked_at = min(source.asked_at, now)
            items.append(ClaimItem(*key, source.read.tables_digest))
        return [Claim(reader=self.me, items=part) for part in _parts(items)]

    def _dones(self, now: float) -> list[Done]:
        items = [notice.item for notice in self._sent(now, DoneItem)]
        return [Done(reader=self.me, items=part) for part in _parts([i for i in items if isinstance(i, DoneItem)])]

    def _releases(self, now: float) -> list[Release]:
        items = [notice.item for notice in self._sent(now, Reference)]
        return [Release(reader=self.me, items=part) for part in _parts([i for i in items if isinstance(i, Reference)])]

    def _sent(self, now: float, kind: type) -> list[_Notice]:
        """Return the due notices of one kind, marked as sent; those that were sent often enough are given up."""
        due = [(key, n) for key, n in self._notices.items() if isinstance(n.item, kind) and n.next_at <= now]
        for key, notice in due:
            notice.num_sent += 1
            notice.next_at = now + self.config.resend_s
            if notice.num_sent > self.config.resend_limit:
                del self._notices[key]
        return [notice for key, notice in due if key in self._notices]

    def _heartbeat(self, now: float) -> list[Renew]:
        if now < self._heartbeat_at or not (self.sources or self.held):
            return []
        self._heartbeat_at, self._renewed_at = now + self.config.heartbeat_s, now
        for reference in [r for r, until in self.held.items() if until <= now]:
            del self.held[reference]
        wanted = dict.fromkeys([Reference(key.request_id, key.generation) for key in self.sources] + list(self.held))
        renewals = []
        for part in _parts(list(wanted)):
            self._number += 1
            self._renewals[self._number] = now
            self.stats.add("heartbeats")
            renewals.append(Renew(reader=self.me, number=self._number, items=part))
        while len(self._renewals) > max(MAX_RENEWALS, 2 * len(renewals)):
            self._renewals.popitem(last=False)
        return renewals

    def _granted(self, message: Granted, now: float) -> None:
        for item in message.items:
            key = ClaimKey(item.request_id, item.generation, item.ticket)
            source = self.sources.get(key)
            if source is None or math.isinf(source.asked_at) or not source.step(ClaimEvent.GRANT):
                self.stats.add("unexpected_messages")
                continue
            if self._asked.pop(key, None) is not None:
                self.stats.observe("claim_seconds", now - source.asked_at)
            source.prove(source.asked_at + item.lease_s)

    def _refused(self, items: Iterable[RefusalItem], now: float) -> list[Refusal]:
        refusals = []
        for item in items:
            key = ClaimKey(item.request_id, item.generation, item.ticket)
            source = self.sources.get(key)
            if source is None or key not in self._asked:
                self.stats.add("unexpected_messages")
            elif item.reason == "not_introduced":
                if self.state is LinkState.READY:
                    self.reset(now)
            elif source.step(ClaimEvent.REFUSE):
                self._asked.pop(key)
                refusals.append(Refusal(source, item.reason, item.detail))
        return refusals

    def _renewed(self, message: Renewed) -> list[Refusal]:
        sent_at = self._renewals.pop(message.number, None)
        if sent_at is None:
            self.stats.add("unexpected_messages")
            return []
        leases = {Reference(i.request_id, i.generation): i.lease_s for i in message.items}
        lost = {Reference(i.request_id, i.generation): i for i in message.lost}
        refusals = []
        for key, source in self.sources.items():
            reference = Reference(key.request_id, key.generation)
            if source.claim is ClaimState.GRANTED and reference in leases:
                source.prove(sent_at + leases[reference])
            elif source.claim is ClaimState.GRANTED and reference in lost and source.step(ClaimEvent.REFUSE):
                refusals.append(Refusal(source, "lease_lost", f"the producer says: {lost[reference].reason}"))
        for reference in lost:
            self.unhold(reference)
        return refusals

    def _acknowledged(self, message: DoneAck | Released) -> None:
        for item in message.items:
            ticket = item.ticket if isinstance(item, DoneItem) else ""
            if self._notices.pop(ClaimKey(item.request_id, item.generation, ticket), None) is None:
                self.stats.add("unexpected_messages")


def _pair(reference: Reference) -> tuple[str, str]:
    return (reference.request_id, reference.generation)


def _parts(items: Sequence[T]) -> list[tuple[T, ...]]:
    return [tuple(items[i : i + MAX_ITEMS]) for i in range(0, len(items), MAX_ITEMS)]
