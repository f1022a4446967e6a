"""Carrier: posts pieces and watches them; the only caller of a transport's ``post`` and ``poll``. Decides nothing.

A piece is touched again (retried, dropped, reported) only when its handle is terminal: until then a write may come.
A staged piece that has arrived is scattered at once, if its read still wants it, and its slot is free again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvplan.errors import PeerGoneError, TransportError
from kvplan.session.lifecycle import PieceEvent, PieceState, ReadState
from kvplan.session.staging import StagingArea
from kvplan.transport.base import Batch, Device, Progress, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.session.config import SessionConfig
    from kvplan.session.reads import Piece
    from kvplan.session.stats import Stats
    from kvplan.transport.base import Transport

logger = logging.getLogger(__name__)


class Ended(NamedTuple):
    """A piece whose bytes are no longer under way."""

    piece: Piece
    why: str
    """Why it failed; empty when it arrived."""
    peer_is_gone: bool = False
    """Whether the transport says that the peer's process has ended."""


class Carrier:
    """Pieces that wait to be posted, and pieces in flight."""

    def __init__(self, *, transport: Transport, local_device: Device, config: SessionConfig, stats: Stats) -> None:
        self._transport = transport
        self._local_device = local_device
        self._config = config
        self._stats = stats
        self._waiting: deque[Piece] = deque()
        self._waiting_for_slot: deque[Piece] = deque()
        self._flying: list[Piece] = []
        self.staging = StagingArea(transport=transport, config=config)

    @property
    def has_waiting(self) -> bool:
        """Whether a piece could be posted right now."""
        ready = bool(self._waiting) or (bool(self._waiting_for_slot) and self.staging.has_free)
        return ready and len(self._flying) < self._config.max_posted

    @property
    def num_flying(self) -> int:
        """Pieces whose bytes may still be written."""
        return len(self._flying)

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
        (self._waiting if piece.scatter is None else self._waiting_for_slot).append(piece)

    def pump(self) -> list[Ended]:
        """Look at what flies, post what may be posted; return the pieces that ended.

        At most ``max_post_bytes`` are posted, because a transport may copy before ``post`` returns.
        """
        ended = [*self._look()]
        budget = self._config.max_post_bytes
        while self.has_waiting and budget > 0:
            piece = self._next()
            if piece.state is PieceState.WAITING:
                budget -= piece.runs.total_bytes
                ended += self._post(piece)
        return ended

    def _next(self) -> Piece:
        if self._waiting:
            return self._waiting.popleft()
        return self._waiting_for_slot.popleft()

    def _look(self) -> Iterator[Ended]:
        flying, self._flying = self._flying, []
        for piece in flying:
            progress = self._poll(piece)
            if progress.state is State.PENDING:
                self._flying.append(piece)
            else:
                yield self._landed(piece, progress)

    def _post(self, piece: Piece) -> list[Ended]:
        """Post one piece; return it if it ended at once."""
        piece.posted_at = time.perf_counter()
        try:
            piece.handle = self._transport.post(self._batch(piece))
        except TransportError as error:
            return [self._unposted(piece, str(error), peer_is_gone=isinstance(error, PeerGoneError))]
        except Exception as error:  # a carrier's own error must end one read, not the thread
            logger.exception("transport %s failed to post a batch to %s", self._transport.name, piece.peer)
            self._stats.add("loop_errors")
            return [self._unposted(piece, f"{type(error).__name__}: {error}")]
        piece.step(PieceEvent.POST)
        progress = self._poll(piece)
        if progress.state is State.PENDING:
            self._flying.append(piece)
            return []
        return [self._landed(piece, progress)]

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

    def _landed(self, piece: Piece, progress: Progress) -> Ended:
        why = "" if progress.state is State.DONE else progress.reason or "the transport does not say why"
        if not why:
            self._stats.observe("transfer_seconds", time.perf_counter() - piece.posted_at)
            self._stats.add("transfers")
            self._stats.add("transferred_bytes", piece.runs.total_bytes)
        if not why and piece.source.read.state is ReadState.READING:
            why = self._scattered(piece)
        self._free_slot(piece)
        piece.step(PieceEvent.FAIL if why else PieceEvent.ARRIVE)
        return Ended(piece, why)

    def _scattered(self, piece: Piece) -> str:
        """Copy a staged piece from its slot into its blocks; return why that was not possible, or nothing."""
        if piece.scatter is None or piece.slot is None:
            return ""
        began_at = time.perf_counter()
        try:
            self.staging.scatter(piece.slot, piece.scatter)
        except Exception as error:  # an error here must end one read, not the thread
            logger.exception("a batch of %s could not be scattered", piece.peer)
            self._stats.add("loop_errors")
            return f"scatter: {type(error).__name__}: {error}"
        self._stats.observe("scatter_seconds", time.perf_counter() - began_at)
        self._stats.add("staged_bytes", piece.scatter.total_bytes)
        return ""

    def _unposted(self, piece: Piece, why: str, *, peer_is_gone: bool = False) -> Ended:
        self._free_slot(piece)
        piece.step(PieceEvent.FAIL)
        return Ended(piece, why, peer_is_gone)

    def _free_slot(self, piece: Piece) -> None:
        if piece.slot is not None:
            self.staging.give_back(piece.slot)
            piece.slot = None
