"""RankSession: what a worker process holds. Values in, values out; the threads live in ``loops``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvplan.session.consumer import Consumer
from kvplan.session.loops import (
    Cancel,
    Close,
    ControlDuty,
    Drop,
    FrontDeskAt,
    Hold,
    Loop,
    OwnLayout,
    ReaderDuty,
    Withdraw,
)
from kvplan.session.nouns import Failure, RankHello, Results
from kvplan.session.producer import Producer
from kvplan.session.reports import note_failure
from kvplan.session.stats import Stats
from kvplan.session.view import Describer
from kvplan.session.worker import AT_ONCE, Hands, Worker
from kvplan.wire.addresses import Address, check_allow_list, checked_address
from kvplan.wire.codec import encode
from kvplan.wire.doorkeeper import admitted
from kvplan.wire.side_channel import Dialer, Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvplan.planner import RankLayout
    from kvplan.session.config import Identity, SessionConfig
    from kvplan.session.nouns import Offer, ReadRequest, RemoteRef
    from kvplan.transport.base import Transport
    from kvplan.wire.messages import Message


class RankSession:
    """One rank's part in every exchange: it offers its blocks, and reads those of others.

    After ``start`` the methods that an engine step calls (``offer`` to ``stats``) only put values into bounded
    queues or take results out: they never block and never raise. One thread at a time calls them.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        layout: RankLayout,
        transport: Transport,
        config: SessionConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind the control socket. The layout's regions are already registered with the transport by its owner."""
        check_allow_list(config.allowed_peers)
        self._config = config
        self._layout = layout
        self._transport = transport
        self._stats = Stats()
        self._refused: dict[str, Failure] = {}
        self._unkept: set[str] = set()
        self._closed = False
        self._started = False
        self._listener = _listener(config)
        self._dialer = Dialer(key=config.side_channel_key, max_bytes=config.max_message_bytes)
        self._worker = Worker(name=f"kvplan-digests-{identity.rank}", max_queue=config.max_digests, stats=self._stats)
        self._scatter = Worker(
            name=f"kvplan-scatter-{identity.rank}", max_queue=config.staging_slots, stats=self._stats,
            num_threads=config.staging_threads,
        )  # fmt: skip
        producer = Producer(
            identity=identity, config=config, stats=self._stats, hands=self._hands(self._worker, lambda: self._control)
        )
        describer = Describer(identity=identity, transport=transport.name, stats=self._stats, clock=clock)
        self._control = ControlDuty(
            producer=producer, listener=self._listener, stats=self._stats, clock=clock, max_queue=config.max_queue,
            describer=describer,
        )  # fmt: skip
        consumer = Consumer(
            identity=identity, layout=layout, config=config, stats=self._stats, transport=transport,
            send=self._send, hang_up=self._dialer.hang_up, hands=self._hands(self._worker, lambda: self._reader),
            scatter=self._hands(self._scatter, lambda: self._reader) if config.staging_threads else AT_ONCE,
        )  # fmt: skip
        self._reader = ReaderDuty(
            consumer=consumer, dialer=self._dialer, stats=self._stats, clock=clock, max_queue=config.max_queue,
            tell_own=lambda own: self._control.mailbox.put(OwnLayout(own), urgent=True), describer=describer,
        )  # fmt: skip
        self._loops = [
            Loop(name=f"kvplan-{name}-{identity.rank}", step=duty.step, sources=duty.sources,
                 wakeup=duty.mailbox.wakeup, stats=self._stats)
            for name, duty in (("control", self._control), ("reader", self._reader))
        ]  # fmt: skip

    def hello(self) -> RankHello:
        """Return what the front desk publishes about this rank."""
        address = str(Address(self._config.public_host, self._listener.port))
        return RankHello(self._layout, address, self._transport.name, self._transport.metadata())

    def set_front_desk(self, host: str, port: int) -> None:
        """Say where this engine's own front desk is: the rank learns its whole engine's layout there."""
        self._reader.mailbox.put(FrontDeskAt(checked_address(host, port)), urgent=True)

    def start(self) -> None:
        """Start the two threads."""
        self._started = True
        for loop in self._loops:
            loop.start()

    def offer(self, offer: Offer) -> None:
        """Keep a request's blocks for a reader; the id comes back in ``Results.sent`` when they are free."""
        if self._closed or not self._control.mailbox.put(offer):
            self._stats.add("overloads")
            self._unkept.add(offer.request_id)

    def withdraw(self, request_id: str) -> None:
        """Refuse new readers of an offer; it is reported sent when the running ones have ended. Idempotent."""
        if not self._control.mailbox.put(Withdraw(request_id)):
            self._stats.add("overloads")

    def read(self, request: ReadRequest) -> None:
        """Read a request's cache; the id comes back once, in ``Results.received`` or ``Results.failed``."""
        if self._closed:
            self._refuse(request, Failure("closing", "the session is shutting down"))
        elif not self._reader.mailbox.put(request):
            self._stats.add("overloads")
            detail = f"more than {self._config.max_queue} commands wait for the reader thread"
            self._refuse(request, Failure("overloaded", detail))

    def cancel(self, request_id: str) -> None:
        """Give up a read; it is reported failed as soon as no write into its blocks is outstanding. Idempotent."""
        if not self._reader.mailbox.put(Cancel(request_id)):
            self._stats.add("overloads")

    def renew(self, remotes: Sequence[RemoteRef]) -> None:
        """Keep the leases of requests that wait here; lasts ``hold_s``, or until they are read or released."""
        if not self._reader.mailbox.put(Hold(tuple(remotes))):
            self._stats.add("overloads")

    def release(self, remote: RemoteRef) -> None:
        """Tell the producer that this engine will not read a reference (full local hit, abort). Idempotent.

        Every rank of the engine calls it; the ranks share the producer's ranks among themselves.
        """
        if not self._reader.mailbox.put(Drop(remote)):
            self._stats.add("overloads")

    def take_results(self) -> Results:
        """Return what ended since the last call."""
        sent, self._unkept = self._unkept, set()
        failed, self._refused = self._refused, {}
        received: set[str] = set()
        while self._control.sent:
            sent |= self._control.sent.popleft()
        while self._reader.results:
            results = self._reader.results.popleft()
            received |= results.received
            failed |= results.failed
        return Results(frozenset(sent), frozenset(received), failed)

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by name; see ``kvplan.session.stats``."""
        return self._stats.snapshot()

    def close(self, timeout_s: float | None = None) -> None:
        """Refuse new work, wait a bounded time for what runs, end the threads, close the transport. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._started:
            ends_at = time.monotonic() + (self._config.close_timeout_s if timeout_s is None else timeout_s)
            self._reader.mailbox.put(Close(), urgent=True)
            self._control.mailbox.put(Close(), urgent=True)
            for duty in (self._reader, self._control):
                duty.quiet.wait(max(0.0, ends_at - time.monotonic()))
            self._worker.close()
            self._scatter.close()
            for loop in self._loops:
                loop.stop()
        self._transport.close()
        self._dialer.close()
        self._listener.close()
        for duty in (self._reader, self._control):
            duty.mailbox.wakeup.close()

    def _refuse(self, request: ReadRequest, failure: Failure) -> None:
        """Fail a read that was never begun."""
        self._refused[request.request_id] = failure
        note_failure(self._stats, request, failure)

    @staticmethod
    def _hands(worker: Worker, whose: Callable[[], ControlDuty | ReaderDuty]) -> Hands:
        """Return a worker as one of the two threads uses it."""

        def wake() -> None:
            whose().mailbox.wakeup.set()

        return Hands(worker.submit, wake, lambda: worker.is_open)

    def _send(self, address: Address, message: Message) -> None:
        if not self._dialer.send(address, encode(message)):
            self._stats.add("overloads")


def _listener(config: SessionConfig) -> Listener:
    """Return the rank's control socket."""
    return Listener(
        host=config.host, key=config.side_channel_key, insecure=config.insecure, max_bytes=config.max_message_bytes,
        admitted=admitted(config.allowed_peers, config.host, config.public_host),
    )  # fmt: skip
