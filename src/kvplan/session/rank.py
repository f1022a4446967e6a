"""RankSession: what a worker process holds. Values in, values out; the threads live in ``loops``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvplan.session.nouns import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvplan.planner import RankLayout
    from kvplan.session.config import Identity, SessionConfig
    from kvplan.session.nouns import Offer, RankHello, ReadRequest, RemoteRef
    from kvplan.transport.base import Transport


class RankSession:
    """One rank's part in every exchange: it offers its blocks, and reads those of others.

    After ``start`` the methods that an engine step calls (``offer`` to ``stats``) only put values into bounded
    queues or take results out: they never block and never raise.
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
        raise NotImplementedError

    def hello(self) -> RankHello:
        """Return what the front desk publishes about this rank."""
        raise NotImplementedError

    def set_front_desk(self, host: str, port: int) -> None:
        """Say where this engine's own front desk is: the rank learns its whole engine's layout there."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the two threads."""
        raise NotImplementedError

    def offer(self, offer: Offer) -> None:
        """Keep a request's blocks for a reader; the id comes back in ``Results.sent`` when they are free."""
        raise NotImplementedError

    def withdraw(self, request_id: str) -> None:
        """Refuse new readers of an offer; it is reported sent when the running ones have ended. Idempotent."""
        raise NotImplementedError

    def read(self, request: ReadRequest) -> None:
        """Read a request's cache; the id comes back once, in ``Results.received`` or ``Results.failed``."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """Give up a read; it is reported failed as soon as no write into its blocks is outstanding. Idempotent."""
        raise NotImplementedError

    def renew(self, remotes: Sequence[RemoteRef]) -> None:
        """Keep the leases of requests that wait here; lasts ``hold_s``, or until they are read or released."""
        raise NotImplementedError

    def release(self, remote: RemoteRef) -> None:
        """Tell the producer that this engine will not read a reference (full local hit, abort). Idempotent.

        Every rank of the engine calls it; the ranks share the producer's ranks among themselves.
        """
        raise NotImplementedError

    def take_results(self) -> Results:
        """Return what ended since the last call."""
        return Results()

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by name; see ``kvplan.session.stats``."""
        raise NotImplementedError

    def close(self, timeout_s: float | None = None) -> None:
        """Refuse new work, wait a bounded time for outstanding transfers, end the threads, close the transport."""
        raise NotImplementedError
