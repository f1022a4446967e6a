"""Loops: the session's threads and the queues into and out of them. What is done in them lives elsewhere.

Two threads belong to a rank, so that neither waits for the other:

* the control thread answers readers (producer); it never touches the transport;
* the reader thread talks to producers and moves bytes (consumer); a transport may copy inside ``post``.

Both sleep in one bounded wait until a frame, a command or a deadline comes. An error that nobody expected is logged,
counted and survived: it costs the message or command that caused it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from kvplan.errors import ProtocolVersionError, WireError
from kvplan.session.nouns import Offer, ReadRequest, Results
from kvplan.session.view import FRESH_S
from kvplan.wire.addresses import Address
from kvplan.wire.codec import decode, encode, refuse_version, version_of
from kvplan.wire.side_channel import Wakeup, wait
from kvplan.wire.status import StatusRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvplan.planner import EngineLayout
    from kvplan.session.consumer import Consumer
    from kvplan.session.nouns import RemoteRef
    from kvplan.session.producer import Answer, Producer
    from kvplan.session.stats import Stats
    from kvplan.session.view import Describer
    from kvplan.wire.messages import Message
    from kvplan.wire.side_channel import Dialer, Event, Letter, Listener, Source

logger = logging.getLogger(__name__)

T = TypeVar("T")

AFTER_ERROR_S = 0.05
"""Pause after a step that failed as a whole, so that a persistent error does not burn a core."""


class Withdraw(NamedTuple):
    """Command to the control thread."""

    request_id: str


class Cancel(NamedTuple):
    """Command to the reader thread."""

    request_id: str


class Hold(NamedTuple):
    """Command to the reader thread."""

    remotes: tuple[RemoteRef, ...]


class Drop(NamedTuple):
    """Command to the reader thread: release a reference."""

    remote: RemoteRef


class FrontDeskAt(NamedTuple):
    """Command to the reader thread."""

    address: Address


class OwnLayout(NamedTuple):
    """Command to the control thread."""

    layout: EngineLayout


class Close(NamedTuple):
    """Command to both threads: refuse new work, finish what runs."""


class Mailbox(Generic[T]):
    """A bounded queue from any thread into a loop."""

    def __init__(self, limit: int) -> None:
        self._items: deque[T] = deque()
        self._limit = limit
        self.wakeup = Wakeup()

    def put(self, item: T, *, urgent: bool = False) -> bool:
        """Return whether there was room; an urgent item always has it."""
        if len(self._items) >= self._limit and not urgent:
            return False
        self._items.append(item)
        self.wakeup.set()
        return True

    def drain(self) -> list[T]:
        """Return and forget everything that is here now."""
        self.wakeup.clear()
        return [self._items.popleft() for _ in range(len(self._items))]


class Loop:
    """A thread that repeats one step and sleeps until the next is due."""

    def __init__(
        self,
        *,
        name: str,
        step: Callable[[], float | None],
        sources: Callable[[], Sequence[Source]],
        wakeup: Wakeup,
        stats: Stats,
    ) -> None:
        self._step = step
        self._sources = sources
        self._wakeup = wakeup
        self._stats = stats
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it; a step in progress ends first."""
        self._stopping.set()
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                timeout_s = self._step()
                if not self._stopping.is_set():
                    wait([*self._sources(), self._wakeup], timeout_s)
            except Exception:
                self._stats.add("loop_errors")
                logger.exception("%s: a step failed", self._thread.name)
                self._stopping.wait(AFTER_ERROR_S)


class ControlDuty:
    """What the control thread does in one step."""

    def __init__(self, *, producer: Producer, listener: Listener, stats: Stats, clock: Callable[[], float],
                 max_queue: int, describer: Describer) -> None:  # fmt: skip
        self._producer = producer
        self._listener = listener
        self._stats = stats
        self._clock = clock
        self._describer = describer
        self._closing = False
        self.mailbox: Mailbox[Offer | Withdraw | OwnLayout | Close] = Mailbox(max_queue)
        self.sent: deque[frozenset[str]] = deque()
        self.quiet = threading.Event()
        """Set when the producer is closing and no reader is at work."""

    def sources(self) -> Sequence[Source]:
        """Return what to watch."""
        return self._listener.sources

    def step(self) -> float | None:
        """Do everything that is due; return the seconds until the next deadline, or None."""
        for command in self.mailbox.drain():
            _survive(self._obey, command, self._stats)
        for letter in self._listener.receive():
            _survive(self._answer, letter, self._stats)
        now = self._clock()
        self._send(self._producer.tick(now))
        offers = self._producer.offers
        sent = offers.take_sent()
        if sent:
            self.sent.append(sent)
        self._stats.set("live_offers", len(offers))
        self._stats.set("parked_messages", self._producer.num_parked)
        if self._closing and not offers.num_claimed:
            self.quiet.set()
        deadline = self._producer.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def _obey(self, command: Offer | Withdraw | OwnLayout | Close) -> None:
        match command:
            case Offer():
                self._send(self._producer.offer(command, self._clock()))
            case Withdraw():
                self._producer.withdraw(command.request_id)
            case OwnLayout():
                self._producer.learn_own(command.layout)
            case Close():
                self._closing = True
                self._producer.close()

    def _answer(self, letter: Letter) -> None:
        message = understood(letter, self._listener, self._stats)
        if isinstance(message, StatusRequest):
            self._listener.send(letter.route, encode(self._describer.status(self._producer.offers)))
        elif message is not None:
            self._send(self._producer.handle(letter.route, message, self._clock()))

    def _send(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if not self._listener.send(answer.route, encode(answer.message)):
                self._stats.add("overloads")


class ReaderDuty:
    """What the reader thread does in one step."""

    def __init__(self, *, consumer: Consumer, dialer: Dialer, stats: Stats, clock: Callable[[], float], max_queue: int,
                 tell_own: Callable[[EngineLayout], object], describer: Describer) -> None:  # fmt: skip
        self._consumer = consumer
        self._dialer = dialer
        self._stats = stats
        self._clock = clock
        self._tell_own: Callable[[EngineLayout], object] | None = tell_own
        self._describer = describer
        self._viewed_at = -math.inf
        self._closing = False
        self.mailbox: Mailbox[ReadRequest | Cancel | Hold | Drop | FrontDeskAt | Close] = Mailbox(max_queue)
        self.results: deque[Results] = deque()
        self.quiet = threading.Event()
        """Set when the consumer is closing and nothing is written or waits for an answer."""

    def sources(self) -> Sequence[Source]:
        """Return what to watch."""
        return self._dialer.sockets

    def step(self) -> float | None:
        """Do everything that is due; return the seconds until the next deadline, or None."""
        for command in self.mailbox.drain():
            _survive(self._obey, command, self._stats)
        for event in self._dialer.receive():
            _survive(self._take, event, self._stats)
        self._consumer.tick(self._clock())
        if self._tell_own is not None and self._consumer.own is not None:
            self._tell_own(self._consumer.own)
            self._tell_own = None
        results = self._consumer.take_results()
        if results:
            self.results.append(results)
        for name, value in self._consumer.gauges().items():
            self._stats.set(name, value)
        if self._closing and self._consumer.is_quiet:
            self.quiet.set()
        now = self._clock()
        deadline = self._consumer.next_deadline(now)
        self._show(now, sleeps_s=deadline - now)
        return None if deadline == math.inf else max(0.0, deadline - now)

    def _show(self, now: float, *, sleeps_s: float) -> None:
        """Leave a view for people who ask, often enough that it is fresh."""
        if sleeps_s > FRESH_S or now - self._viewed_at >= FRESH_S:
            self._viewed_at = now
            self._describer.view = self._consumer.view(now)

    def _obey(self, command: ReadRequest | Cancel | Hold | Drop | FrontDeskAt | Close) -> None:
        now = self._clock()
        match command:
            case ReadRequest():
                self._consumer.read(command, now)
            case Cancel():
                self._consumer.cancel(command.request_id, now)
            case Hold():
                self._consumer.renew(command.remotes, now)
            case Drop():
                self._consumer.release(command.remote, now)
            case FrontDeskAt():
                self._consumer.set_own_desk(command.address)
            case Close():
                self._closing = True
                self._consumer.close(now)

    def _take(self, event: Event) -> None:
        address, now = event.address, self._clock()
        if event.frame is None:
            self._consumer.line_changed(address, now, is_up=event.is_up)
            return
        try:
            message = decode(event.frame)
        except ProtocolVersionError as error:
            self._consumer.fault(address, "incompatible", str(error), now)
        except WireError as error:
            self._stats.add("malformed_messages")
            self._consumer.fault(address, "handshake_failed", str(error), now)
        else:
            self._consumer.hear(address, message, now)


def understood(letter: Letter, listener: Listener, stats: Stats) -> Message | None:
    """Return the message in a letter, or None; a stranger version is told which ones are spoken here."""
    try:
        return decode(letter.frame)
    except ProtocolVersionError:
        got = version_of(letter.frame)
        if got:
            listener.send(letter.route, refuse_version(got))
    except WireError:
        pass
    stats.add("malformed_messages")
    return None


def _survive(action: Callable[[T], None], what: T, stats: Stats) -> None:
    """Do something whose failure must cost nothing but itself."""
    try:
        action(what)
    except Exception:
        stats.add("loop_errors")
        logger.exception("a command or message could not be handled")
