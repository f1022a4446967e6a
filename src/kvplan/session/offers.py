"""Offers: which blocks this producer rank keeps, for whom, until when. No messages' routes, no threads.

1. An offer is (request id, generation). Its lease runs from the start; claims and renewals move it, never back.
2. The first claim makes its (engine, ticket) the owner: one reference serves one read of one engine.
3. Readers are ranks that the owner's election names. The offer ends when each of them is done, by identity;
   or when it is shut (withdrawn, released) and every reader that was let in is done; or with its lease.
4. What has ended is remembered with its reason, within a bound, so that a late claim hears why.

A claim is granted only while the offer is live, and an ended offer never becomes live again: so whoever holds a
grant knows that the blocks were unchanged from before its first read until the lease that the grant states.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvplan.session.advice import ADVICE, logfmt
from kvplan.session.lease import LeaseBook
from kvplan.session.lifecycle import OFFER, OfferEvent, OfferState, advance
from kvplan.wire.fingerprint import tables_digest
from kvplan.wire.messages import GrantItem, RefusalItem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.session.config import SessionConfig
    from kvplan.session.nouns import Offer
    from kvplan.session.stats import Stats
    from kvplan.wire.messages import ClaimItem, DoneItem, Party, Reference


logger = logging.getLogger(__name__)


class OfferKey(NamedTuple):
    """What names an offer."""

    request_id: str
    generation: str


class Owner(NamedTuple):
    """The one read that an offer serves."""

    engine_id: str
    ticket: str


@dataclass(slots=True)
class Entry:
    """One live offer."""

    offer: Offer
    state: OfferState = OfferState.OPEN
    owner: Owner | None = None
    claimed: set[int] = field(default_factory=set)
    """Reader ranks that were let in and are not done."""
    done: set[int] = field(default_factory=set)
    shut_because: str = ""
    digest: str | None = None

    def tables_digest(self) -> str:
        """Return the digest of the offered tables, empty when the offer leaves them unchecked."""
        if self.digest is None:
            self.digest = tables_digest(self.offer.tables, self.offer.num_tokens) if self.offer.tables else ""
        return self.digest


class OfferBook:
    """Every live offer of one rank, and the memory of ended ones."""

    def __init__(self, *, config: SessionConfig, stats: Stats) -> None:
        self._config = config
        self._stats = stats
        self._entries: dict[OfferKey, Entry] = {}
        self._by_request: dict[str, set[OfferKey]] = {}
        self._ended: OrderedDict[OfferKey, str] = OrderedDict()
        self._leases = LeaseBook[OfferKey]()
        self._sent: set[str] = set()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_claimed(self) -> int:
        """Offers that a reader may be reading right now."""
        return sum(bool(entry.claimed) for entry in self._entries.values())

    def add(self, offer: Offer, now: float) -> None:
        """Keep an offer. The same again is ignored; a newer generation shuts the older ones of its request."""
        key = OfferKey(offer.request_id, offer.generation)
        if key in self._entries or key in self._ended:
            self._stats.add("duplicates_ignored")
            return
        self._stats.add("offers")
        if len(self._entries) >= self._config.max_offers:
            self._stats.add("overloads")
            self._remember(key, "overloaded")
            self._sent.add(offer.request_id)
            return
        self.shut_request(offer.request_id, "stale_generation")
        self._sent.discard(offer.request_id)
        self._entries[key] = Entry(offer)
        self._by_request.setdefault(offer.request_id, set()).add(key)
        self._leases.extend(key, now + (offer.lease_s or self._config.lease_s))

    def shut_request(self, request_id: str, reason: str) -> None:
        """Let no new reader into any offer of a request."""
        for key in tuple(self._by_request.get(request_id, ())):
            self._shut(key, reason)

    def claim(self, reader: Party, item: ClaimItem, readers: frozenset[int], now: float) -> GrantItem | RefusalItem:
        """Grant or refuse one claim of an offer that is known (live, ended or superseded)."""
        key = OfferKey(item.request_id, item.generation)
        entry = self._entries.get(key)
        reason = self.why_not(key) if entry is None else _refusal(entry, reader, item, readers)
        if entry is None or reason:
            self._stats.refuse(reason)
            self._stats.add("stale_references", entry is None)
            return RefusalItem(*key, reason, ticket=item.ticket)
        if reader.rank not in entry.claimed:
            entry.state = advance(OFFER, entry.state, OfferEvent.CLAIM)
        entry.owner = Owner(reader.engine_id, item.ticket)
        entry.claimed.add(reader.rank)
        self._stats.add("claims_granted")
        return GrantItem(*key, self._extended(key, now), item.ticket)

    def done(self, reader: Party, item: DoneItem, readers: frozenset[int]) -> None:
        """Note that one reader is done, once; whatever says nothing new is counted and ignored."""
        key = OfferKey(item.request_id, item.generation)
        entry = self._entries.get(key)
        by = Owner(reader.engine_id, item.ticket)
        if entry is None or reader.rank in entry.done:
            self._stats.add("done_duplicates")
        elif reader.rank not in readers or (entry.owner or by) != by:
            self._stats.add("done_strangers")
        else:
            entry.owner = by
            entry.claimed.discard(reader.rank)
            entry.done.add(reader.rank)
            finished = not entry.claimed and (entry.state is OfferState.CLOSING or entry.done >= readers)
            self._step(key, OfferEvent.LAST_DONE if finished else OfferEvent.READER_DONE, "released")

    def release(self, engine_id: str, item: Reference) -> None:
        """Let no further reader of an engine in; an offer that another engine reads is left alone."""
        key = OfferKey(item.request_id, item.generation)
        entry = self._entries.get(key)
        if entry is None or (entry.owner is not None and entry.owner.engine_id != engine_id):
            self._stats.add("done_duplicates")
            return
        self._stats.add("releases")
        self._shut(key, "released")

    def renew(self, engine_id: str, item: Reference, now: float) -> GrantItem | RefusalItem | None:
        """Extend one lease, or say why it is lost; None for an offer that is not known (yet)."""
        key = OfferKey(item.request_id, item.generation)
        entry = self._entries.get(key)
        if entry is None:
            reason = self.why_not(key)
            return RefusalItem(*key, reason) if reason else None
        if entry.owner is not None and entry.owner.engine_id != engine_id:
            return RefusalItem(*key, "claimed_by_another")
        self._stats.add("leases_renewed")
        return GrantItem(*key, self._extended(key, now))

    def why_not(self, key: OfferKey) -> str:
        """Return why an offer that is not live cannot be had; empty when it may still come, or is live."""
        if key in self._entries:
            return ""
        reason = self._ended.get(key)
        return reason or ("stale_generation" if self._by_request.get(key.request_id) else "")

    def expire(self, now: float) -> None:
        """End every offer whose lease has ended."""
        for key in self._leases.expire(now):
            entry = self._entries[key]
            logger.warning("%s", _expired(key, entry))
            self._stats.add("expiries")
            self._step(key, OfferEvent.EXPIRE, "expired")

    def next_deadline(self) -> float | None:
        """Return when the next lease ends."""
        return self._leases.next_deadline()

    def take_sent(self) -> frozenset[str]:
        """Return the requests whose offers have all ended since the last call."""
        sent, self._sent = frozenset(self._sent), set()
        return sent

    def ends_at(self, key: OfferKey) -> float:
        """Return when a live offer's lease ends."""
        return self._leases.deadline(key) or 0.0

    def live(self) -> Mapping[OfferKey, Entry]:
        """Return the live offers; to look at, not to change."""
        return self._entries

    def _extended(self, key: OfferKey, now: float) -> float:
        return self._leases.extend(key, now + self._config.extension_s) - now

    def _shut(self, key: OfferKey, reason: str) -> None:
        entry = self._entries[key]
        entry.shut_because = entry.shut_because or reason
        self._step(key, OfferEvent.SHUT, entry.shut_because)
        if entry.state is OfferState.CLOSING and not entry.claimed:
            self._step(key, OfferEvent.LAST_DONE, entry.shut_because)

    def _step(self, key: OfferKey, event: OfferEvent, reason: str) -> None:
        entry = self._entries[key]
        entry.state = advance(OFFER, entry.state, event)
        if entry.state is not OfferState.ENDED:
            return
        del self._entries[key]
        siblings = self._by_request[key.request_id]
        siblings.discard(key)
        if not siblings:
            del self._by_request[key.request_id]
            self._sent.add(key.request_id)
        self._leases.end(key)
        self._remember(key, entry.shut_because or reason)
        self._stats.add("offers_ended")

    def _remember(self, key: OfferKey, reason: str) -> None:
        self._ended[key] = reason
        while len(self._ended) > self._config.max_remembered:
            self._ended.popitem(last=False)


def _expired(key: OfferKey, entry: Entry) -> str:
    """Return the log line for an offer whose lease has ended."""
    return logfmt(
        "offer expired",
        request=key.request_id,
        reader=entry.owner.engine_id if entry.owner else "nobody",
        reading=len(entry.claimed),
        do="look at the reader: it stopped renewing" if entry.owner else ADVICE["expired"],
    )


def _refusal(entry: Entry, reader: Party, item: ClaimItem, readers: frozenset[int]) -> str:
    """Return why a reader must not be let into a live offer, or an empty string."""
    if entry.owner is not None and entry.owner != Owner(reader.engine_id, item.ticket):
        return "claimed_by_another"
    if reader.rank in entry.done:
        return "released"
    if reader.rank not in readers:
        return "not_elected"
    if entry.tables_digest() and item.tables_digest and entry.tables_digest() != item.tables_digest:
        return "tables_differ"
    if entry.state is OfferState.CLOSING and reader.rank not in entry.claimed:
        return entry.shut_because
    return ""
