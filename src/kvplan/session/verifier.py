"""Verifier: whether the bytes of a read are those of its producer. Asks and compares; reads end elsewhere.

1. A read whose bytes and grants are here is verified when its id is among the sampled ones: every rank of an engine
   comes to the same answer.
2. For each rank that it reads from, a worker takes the digests of the bytes here, and the rank is asked for its own.
   Questions are repeated until answered; meanwhile the link goes on renewing the lease.
3. Where they differ, both sides are asked again, about less and less (``descent``), down to the first wrong atom.
4. When all ranks are through, or time is over, there is a verdict: right, or a failure.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from kvplan.errors import KVPlanError
from kvplan.session.check import Mismatch, begun
from kvplan.session.digest import Digests, digests
from kvplan.session.lifecycle import LinkState
from kvplan.session.nouns import Failure
from kvplan.wire.digests import Digest, Digested, DigestRefused, ScopeItem, TableItem
from kvplan.wire.messages import Party

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.planner import RankLayout
    from kvplan.session.check import Check, Inquiry
    from kvplan.session.config import Identity, SessionConfig
    from kvplan.session.reads import Read
    from kvplan.session.stats import Stats
    from kvplan.session.worker import Hands
    from kvplan.wire.addresses import Address
    from kvplan.wire.messages import Message

logger = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """What verification has come to."""

    read: Read
    failure: Failure | None


class Verifier:
    """Every read that is being verified."""

    def __init__(
        self,
        *,
        identity: Identity,
        layout: RankLayout,
        config: SessionConfig,
        stats: Stats,
        send: Callable[[Address, Message], object],
        hands: Hands,
    ) -> None:
        self._me = Party(identity.engine_id, identity.rank)
        self._order = {item.key: place for place, item in enumerate(layout.components)}
        self._config = config
        self._stats = stats
        self._send = send
        self._hands = hands
        self._number = 0
        self._inquiries: dict[Read, Inquiry] = {}
        self._open: dict[int, Check] = {}
        """By the number of the question that waits for an answer."""
        self._finished: deque[tuple[Check, Digests | Mismatch | Exception]] = deque()

    def wants(self, request_id: str) -> bool:
        """Return whether a request is among those that are verified."""
        return is_sampled(request_id, self._config.verify_rate)

    def begin(self, read: Read, now: float) -> None:
        """Begin to verify a read whose bytes are here; the next ``tick`` asks."""
        self._inquiries[read] = begun(read, self._me, self._order, now, now + self._config.verify_timeout_s)

    def hear(self, address: Address, message: Message, now: float) -> bool:
        """Take a message if it answers a question for digests; return whether it is of that kind."""
        if not isinstance(message, Digested | DigestRefused):
            return False
        check = self._open.get(message.number)
        if check is None or check.source.link.address != address or (message.engine_id, message.rank) != (
            self._me.engine_id, self._me.rank
        ):  # fmt: skip
            self._stats.add("unexpected_messages")
        elif isinstance(message, Digested):
            del self._open[message.number]
            components = {(item.layer, item.component): item.digest for item in message.components}
            check.theirs = Digests(components, message.parts, message.total)
        else:
            self._refused(check, message, now)
        return True

    def tick(self, now: float) -> list[Verdict]:
        """Say and do what is due; return the verdicts that there are now."""
        while self._finished:
            self._take(*self._finished.popleft())
        for inquiry in self._inquiries.values():
            for check in inquiry.checks:
                self._advance(check, now)
        over = [inquiry for inquiry in self._inquiries.values() if now >= inquiry.ends_at or inquiry.is_over]
        return [self._judged(inquiry, now) for inquiry in over]

    def next_due(self) -> float:
        """Return when ``tick`` has something to do, unless an answer or a result comes before."""
        if self._finished:
            return -math.inf
        times = [inquiry.ends_at for inquiry in self._inquiries.values()]
        for inquiry in self._inquiries.values():
            times.extend(check.ask_at for check in inquiry.checks if check.needs_anything)
        return min(times, default=math.inf)

    def drop(self, read: Read) -> None:
        """Forget a read, whatever has become of it."""
        inquiry = self._inquiries.pop(read, None)
        for check in inquiry.checks if inquiry else ():
            self._open.pop(check.number, None)

    def _advance(self, check: Check, now: float) -> None:
        """Do what a check needs next, unless that has been tried just now."""
        check.step()
        if check.ask_at > now or not check.needs_anything:
            return
        scope = check.descent.scope
        if check.needs_theirs:
            self._ask(check)
        if check.needs_ours:
            self._have_done(check, lambda: digests(check.here, scope, is_wanted=self._hands.is_open))
        if check.needs_name:
            self._have_done(check, lambda: check.named(self._me, self._order))
        check.ask_at = now + self._config.resend_s

    def _ask(self, check: Check) -> None:
        """Send a check's question, or send it again."""
        if not check.number:
            self._number += 1
            check.number = self._number
            self._open[check.number] = check
        key = check.source.key
        question = Digest(
            engine_id=self._me.engine_id,
            rank=self._me.rank,
            number=check.number,
            request_id=key.request_id,
            generation=key.generation,
            ticket=key.ticket,
            tables=tuple(TableItem(t.first_token, tuple(t.ids().tolist())) for t in check.here.destination),
            scope=ScopeItem(*check.descent.scope),
        )
        self._send(check.source.link.address, question)

    def _refused(self, check: Check, message: DigestRefused, now: float) -> None:
        """Take a no: ask again where that may help, else fail."""
        detail = f"{check.name}: {message.detail or message.reason}"
        if message.reason == "not_introduced":
            if check.source.link.state is LinkState.READY:
                check.source.link.reset(now)
            check.ask_at = -math.inf
        elif message.reason == "not_claimed":
            check.failure = Failure("lease_lost", detail)
        elif message.reason != "overloaded":
            reason = "verify_unsupported" if message.reason == "unsupported" else "verify_failed"
            check.failure = Failure(reason, detail)

    def _have_done(self, check: Check, job: Callable[[], Digests | Mismatch]) -> None:
        """Let a worker do a job of a check; when there is no room, it is tried again later."""

        def work() -> None:
            begun_at = perf_counter()
            result: Digests | Mismatch | Exception
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - whatever it is ends one read, and is told there
                result = error
            self._stats.observe("digest_seconds", perf_counter() - begun_at)
            self._finished.append((check, result))
            self._hands.wake()

        check.is_busy = True
        if not self._hands.submit(work):
            check.is_busy = False

    def _take(self, check: Check, result: Digests | Mismatch | Exception) -> None:
        """Take what a worker has found."""
        check.is_busy = False
        if isinstance(result, Digests):
            check.ours = result
        elif isinstance(result, Mismatch):
            check.mismatch = result
        else:
            if not isinstance(result, KVPlanError):
                self._stats.add("loop_errors")
                logger.error("digests of the bytes here could not be taken", exc_info=result)
            check.failure = Failure("verify_failed", f"digests of the bytes here: {type(result).__name__}: {result}")

    def _judged(self, inquiry: Inquiry, now: float) -> Verdict:
        """Return the verdict on a read and forget it."""
        self.drop(inquiry.read)
        seconds = now - inquiry.began_at
        self._stats.observe("verify_seconds", seconds)
        failure = inquiry.failure(seconds)
        self._stats.add("reads_verified", failure is None)
        self._stats.add("digest_mismatches", failure is not None and failure.reason == "digest_mismatch")
        return Verdict(inquiry.read, failure)


def is_sampled(request_id: str, rate: float) -> bool:
    """Return whether a request is verified: for each id always the same, for ``rate`` of all ids yes.

    >>> [is_sampled("request-1", rate) for rate in (0.0, 1.0)], sum(is_sampled(f"r{i}", 0.25) for i in range(1000))
    ([False, True], 261)
    """
    return rate >= 1.0 or (rate > 0.0 and xxh3_64_intdigest(request_id.encode()) < rate * (1 << 64))
