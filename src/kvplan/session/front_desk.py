"""FrontDesk: one thread in the scheduler process that answers ``hello``. No leases, no claims, no transport."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvplan.errors import LimitError
from kvplan.planner import EngineLayout
from kvplan.session.loops import Loop, understood
from kvplan.session.stats import Stats
from kvplan.session.view import desk_status
from kvplan.wire.codec import encode
from kvplan.wire.doorkeeper import admitted
from kvplan.wire.layouts import to_body
from kvplan.wire.messages import FEATURES, Error, Hello, HelloRequest, NotReady, RankCard
from kvplan.wire.side_channel import Listener, Wakeup
from kvplan.wire.status import StatusRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvplan.session.config import SessionConfig
    from kvplan.session.nouns import RankHello
    from kvplan.wire.side_channel import Source
    from kvplan.wire.status import Status

NOT_PUBLISHED = "the engine's ranks have not been published yet"


class FrontDesk:
    """Answers whoever asks with this engine's hello; before its ranks are published, with "not ready"."""

    def __init__(self, *, host: str, port: int, config: SessionConfig) -> None:
        """Bind ``host:port``; port 0 takes a free one. The key comes from ``config``."""
        self._max_bytes = config.max_message_bytes
        self._stats = Stats()
        self._answer = encode(NotReady(detail=NOT_PUBLISHED))
        self._listener = Listener(
            host=host, port=port, key=config.side_channel_key, insecure=config.insecure, max_bytes=self._max_bytes,
            admitted=admitted(config.allowed_peers, host, config.public_host),
        )  # fmt: skip
        self._wakeup = Wakeup()
        self._describe: Callable[[], Status | NotReady] = lambda: NotReady(detail=NOT_PUBLISHED)
        self._closed = False
        self._loop = Loop(
            name="kvplan-front-desk", step=self._step, sources=self._sources, wakeup=self._wakeup, stats=self._stats
        )

    @property
    def port(self) -> int:
        """The port that is bound."""
        return self._listener.port

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def publish(self, engine_id: str, compatibility: Mapping[str, str], ranks: Sequence[RankHello]) -> None:
        """Set the hello; may be called before or after ``start``, and again. Raises ``LayoutError``, ``LimitError``."""
        layout = EngineLayout(engine_id, tuple(rank.layout for rank in ranks))
        hello = Hello(
            engine_id=engine_id,
            compatibility=dict(compatibility),
            layout=to_body(layout),
            ranks=tuple(RankCard(rank.control_address, rank.transport, rank.metadata) for rank in ranks),
            features=FEATURES,
        )
        answer = encode(hello)
        if len(answer) > self._max_bytes:
            raise LimitError(f"the hello has {len(answer)} bytes; raise max_message_bytes from {self._max_bytes}")
        self._answer = answer
        facts, published, began_at = dict(compatibility), tuple(ranks), time.monotonic()
        self._describe = lambda: desk_status(
            engine_id=engine_id, facts=facts, ranks=published, stats=self._stats,
            uptime_s=time.monotonic() - began_at,
        )  # fmt: skip

    def stats(self) -> dict[str, float]:
        """Return counters by name; see ``kvplan.session.stats``."""
        return self._stats.snapshot()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.stop()
        self._listener.close()
        self._wakeup.close()

    def _sources(self) -> Sequence[Source]:
        return self._listener.sources

    def _step(self) -> None:
        self._wakeup.clear()
        for letter in self._listener.receive():
            message = understood(letter, self._listener, self._stats)
            if isinstance(message, HelloRequest):
                self._listener.send(letter.route, self._answer)
            elif isinstance(message, StatusRequest):
                self._listener.send(letter.route, encode(self._describe()))
            elif message is not None:
                self._stats.add("unexpected_messages")
                detail = f"a front desk answers hello_request, not {type(message).__name__}"
                self._listener.send(letter.route, encode(Error(reason="unexpected", detail=detail)))
