"""Carrier: posts pieces and watches them; alone calls a transport's ``post`` and ``poll``. Decides nothing.

1. Pieces wait in one queue per peer; peers take turns, and a peer that waits for a staging slot holds up nobody.
2. A piece is touched again (retried, dropped, reported) only when its handle is terminal: until then a write may come.
3. A staged piece that has arrived is scattered, if its read still wants it, by other hands, so that the next is read
   meanwhile. Its slot is free when that is done.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvplan.errors import PeerGoneError, TransportError
from kvplan.session.lifecycle import PieceEvent, PieceState, ReadState
from kvplan.session.queues import PieceQueues
from kvplan.session.staging import StagingArea
from kvplan.session.worker import AT_ONCE
from kvplan.transport.base import Batch, Device, Progress, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.planner import Descriptors
    from kvplan.session.config import SessionConfig
    from kvplan.session.reads import Piece
    from kvplan.session.stats import Stats
    from kvplan.session.worker import Hands
    from kvplan.transport.base import Transport

logger = logging.getLogger(__name__)

LOOKS = 16
"""A look at what flies is due when so large a part of the time since the last change has passed again."""


class Ended(NamedTuple):
    """A piece whose bytes are no longer under way."""

    piece: Piece
    why: str
    """Why it failed; empty when it arrived."""
    peer_is_gone: bool = False
    """Whether the transport says that the peer's process has ended."""


class Carrier:
    """Pieces that wait to be posted, pieces in flight, and pieces that are scattered."""

    def __init__(
        self,
        *,
        transport: Transport,
        local_device: Device,
        config: SessionConfig,
        stats: Stats,
        hands: Hands = AT_ONCE,
    ) -> None:
        self._transport = transport
        self._local_device = local_device
        self._config = config
        self._stats = stats
        self._hands = hands
        self._waiting = PieceQueues()
        self._flying: list[Piece] = []
        self._num_scattering = 0
        self._moved_at = 0.0
        """When something was last posted, or seen to have ended."""
        self._scattered: deque[Ended] = deque()
        """What the other hands have done since the last look."""
        self.staging = StagingArea(transport=transport, config=config)

    @property
    def is_due(self) -> bool:
        """Whether ``pump`` has something to do right now."""
        return bool(self._scattered) or self._can_post

    @property
    def num_flying(self) -> int:
        """Pieces whose bytes a transport may still write."""
        return len(self._flying)

    @property
    def num_busy(self) -> int:
        """Pieces whose bytes somebody may still write, into their blocks or into staging."""
        return len(self._flying) + self._num_scattering

    def gauges(self) -> dict[str, float]:
        """Return what is in flight, by the names of ``kvplan.session.declared``."""
        return {
            "transfers_in_flight": len(self._flying),
            "bytes_in_flight": sum(piece.runs.total_bytes for piece in self._flying),
            "staging_bytes": self.staging.num_bytes,
            "staging_slots_used": self.staging.num_used,
        }

    def submit(self, piece: Piece) -> None:
        """Take a piece; it is posted by a later ``pump``."""
        self._waiting.add(piece)

    def next_look(self, now: float) -> float:
        """Return when to look at what flies: often at first, seldom at what has been under way for long."""
        if not self._flying:
            return math.inf
        return now + min(max((now - self._moved_at) / LOOKS, self._config.poll_s), self._config.poll_max_s)

    def pump(self, now: float) -> list[Ended]:
        """Look at what flies, post what may be posted; return the pieces that ended.

        At most ``max_post_bytes`` are posted, because a transport may copy before ``post`` returns.
        """
        ended = [*self._look()]
        if ended or self._can_post:
            self._moved_at = now
        budget = self._config.max_post_bytes
        while self._can_post and budget > 0:
            piece = self._waiting.take(staged=self.staging.has_free)
            if piece.state is PieceState.WAITING:
                budget -= piece.runs.total_bytes
                ended += self._post(piece)
        return ended + self._ended_scatters()

    def disconnect(self, peer: str) -> None:
        """Let the transport forget a peer. That it cannot costs memory there, and must cost nothing here."""
        try:
            self._transport.disconnect(peer)
        except TransportError as error:
            logger.warning("transport %s did not forget %s: %s", self._transport.name, peer, error)
        except Exception:
            logger.exception("transport %s failed to forget %s", self._transport.name, peer)
            self._stats.add("loop_errors")

    @property
    def _can_post(self) -> bool:
        ready = self._waiting.has_any(staged=self.staging.has_free)
        return ready and len(self._flying) < self._config.max_posted

    def _look(self) -> Iterator[Ended]:
        flying, self._flying = self._flying, []
        for piece in flying:
            yield from self._looked_at(piece)

    def _looked_at(self, piece: Piece) -> list[Ended]:
        """Poll a posted piece; return it if it has ended."""
        progress = self._poll(piece)
        if progress.state is State.PENDING:
            self._flying.append(piece)
            return []
        return self._landed(piece, progress)

    def _post(self, piece: Piece) -> list[Ended]:
        """Post one piece; return it if it ended at once."""
        piece.posted_at = time.perf_counter()
        try:
            piece.handle = self._transport.post(self._batch(piece))
        except TransportError as error:
            return [self._failed(piece, str(error), peer_is_gone=isinstance(error, PeerGoneError))]
        except Exception as error:  # a carrier's own error must end one read, not the thread
            logger.exception("transport %s failed to post a batch to %s", self._transport.name, piece.peer)
            self._stats.add("loop_errors")
            return [self._failed(piece, f"{type(error).__name__}: {error}")]
        piece.step(PieceEvent.POST)
        return self._looked_at(piece)

    def _batch(self, piece: Piece) -> Batch:
        runs = piece.runs
        local = self._local_device
        if piece.scatter is not None:
            piece.slot = self.staging.take()
            runs, local = self.staging.placed(piece.slot, runs), Device("cpu")
        remote = piece.source.remote_device
        return Batch(piece.peer, runs.destination_address, runs.source_address, runs.num_bytes, local, remote)

    def _poll(self, piece: Piece) -> Progress:
        if piece.handle is None:
            return Progress(State.FAILED, "never posted")
        try:
            return self._transport.poll(piece.handle)
        except Exception:  # poll must not raise; if it does, nothing is known, so the piece stays in flight
            logger.exception("transport %s failed to poll a batch of %s", self._transport.name, piece.peer)
            self._stats.add("loop_errors")
            return Progress(State.PENDING)

    def _landed(self, piece: Piece, progress: Progress) -> list[Ended]:
        if progress.state is not State.DONE:
            return [self._failed(piece, progress.reason or "the transport does not say why")]
        self._stats.observe("transfer_seconds", time.perf_counter() - piece.posted_at)
        self._stats.add("transfers")
        self._stats.add("transferred_bytes", piece.runs.total_bytes)
        if piece.scatter is None or piece.slot is None or piece.source.read.state is not ReadState.READING:
            return [self._arrived(piece)]
        self._have_scattered(piece, piece.slot, piece.scatter)
        return []

    def _have_scattered(self, piece: Piece, slot: int, runs: Descriptors) -> None:
        """Let other hands copy a staged piece from its slot into its blocks; do it here when they have no room."""

        def work() -> None:
            self._scattered.append(Ended(piece, self._scatter(slot, runs)))
            self._hands.wake()

        piece.step(PieceEvent.SCATTER)
        self._num_scattering += 1
        if not self._hands.submit(work):
            work()

    def _scatter(self, slot: int, runs: Descriptors) -> str:
        """Copy runs out of a slot; return why that was not possible, or nothing. Called from any thread."""
        began_at = time.perf_counter()
        try:
            self.staging.scatter(slot, runs)
        except Exception as error:  # an error here must end one read, not the thread
            logger.exception("a batch could not be scattered")
            self._stats.add("loop_errors")
            return f"scatter: {type(error).__name__}: {error}"
        self._stats.observe("scatter_seconds", time.perf_counter() - began_at)
        self._stats.add("staged_bytes", runs.total_bytes)
        return ""

    def _ended_scatters(self) -> list[Ended]:
        ended = []
        while self._scattered:
            piece, why, _ = self._scattered.popleft()
            self._num_scattering -= 1
            ended.append(self._failed(piece, why) if why else self._arrived(piece))
        return ended

    def _arrived(self, piece: Piece) -> Ended:
        self._free_slot(piece)
        piece.step(PieceEvent.ARRIVE)
        return Ended(piece, "")

    def _failed(self, piece: Piece, why: str, *, peer_is_gone: bool = False) -> Ended:
        self._free_slot(piece)
        piece.step(PieceEvent.FAIL)
        return Ended(piece, why, peer_is_gone)

    def _free_slot(self, piece: Piece) -> None:
        if piece.slot is not None:
            self.staging.give_back(piece.slot)
            piece.slot = None
