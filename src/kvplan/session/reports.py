"""Reports: what became of reads, for the engine thread, for the counters and for the log. Decides nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvplan.errors import (
    BindError,
    CompatibilityError,
    OverloadedError,
    PeerGoneError,
    PlanError,
    RefusedError,
    TransportError,
    WireError,
)
from kvplan.session.advice import advice, logfmt
from kvplan.session.nouns import REASONS, Failure, Results
from kvplan.session.stats import FailureNote
from kvplan.wire.addresses import checked_address

if TYPE_CHECKING:
    from kvplan.session.link import Refusal
    from kvplan.session.nouns import ReadRequest, RemoteRef
    from kvplan.session.reads import Read
    from kvplan.session.stats import Stats

logger = logging.getLogger(__name__)

_BY_ERROR: tuple[tuple[type[Exception], str], ...] = (
    (PeerGoneError, "peer_gone"),
    (TransportError, "transport_error"),
    (BindError, "bind_failed"),
    (MemoryError, "bind_failed"),
    (OverloadedError, "overloaded"),
    (CompatibilityError, "incompatible"),
    (PlanError, "incompatible"),
    (WireError, "handshake_failed"),
)
"""First match wins: subclasses stand before their bases."""


class Reports:
    """Ended reads that have not been taken yet."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._received: set[str] = set()
        self._failed: dict[str, Failure] = {}

    def succeeded(self, read: Read, now: float) -> None:
        """Report that a read's bytes are here and proven."""
        pieces = list(read.pieces())
        self._received.add(read.request_id)
        self._stats.add("descriptors", sum(len(piece.runs) for piece in pieces))
        num_bytes = sum((piece.scatter or piece.runs).total_bytes for piece in pieces)
        self._stats.receive(num_bytes, str(read.peer.desk))
        self._stats.observe("read_seconds", now - read.began_at)

    def failed(self, request: ReadRequest, failure: Failure) -> None:
        """Report that a read has failed and that nothing writes into its blocks."""
        self._failed[request.request_id] = failure
        note_failure(self._stats, request, failure)

    def take(self) -> Results:
        """Return what has been reported since the last call."""
        results = Results(received=frozenset(self._received), failed=self._failed)
        self._received, self._failed = set(), {}
        return results


def note_failure(stats: Stats, request: ReadRequest, failure: Failure) -> None:
    """Count a failed read, remember it for people who ask, and write its log line. Called from any thread."""
    remote = request.remote
    at = f"{remote.host}:{remote.port}"
    stats.fail(failure.reason, _label(remote))
    stats.remember(FailureNote(request.request_id, remote.engine_id, at, failure.reason, failure.detail))
    logger.warning(
        "%s",
        logfmt(
            "read failed",
            request=request.request_id,
            reason=failure.reason,
            peer=remote.engine_id,
            at=at,
            remote_request=remote.request_id,
            detail=failure.detail,
            meaning=REASONS.get(failure.reason, ""),
            do=advice(failure.reason),
        ),
    )


def failure_of(error: Exception) -> Failure:
    """Return the failure that an error stands for.

    >>> failure_of(BindError("block 7 of 4"))
    Failure(reason='bind_failed', detail='block 7 of 4')
    """
    if isinstance(error, RefusedError):
        return Failure(error.reason, str(error))
    reason = next((reason for kind, reason in _BY_ERROR if isinstance(error, kind)), "handshake_failed")
    return Failure(reason, str(error) or type(error).__name__)


def refused_by(refusal: Refusal) -> Failure:
    """Return the failure of a read one of whose sources must not be believed."""
    them, detail = refusal.source.link.them, refusal.detail
    reason = refusal.reason if refusal.reason in REASONS else "refused"
    return Failure(reason, f"rank {them.rank} of engine {them.engine_id} refused{': ' if detail else ''}{detail}")


def _label(remote: RemoteRef) -> str:
    """Return the front desk's address as a label; empty for one that cannot be meant."""
    try:
        return str(checked_address(remote.host, remote.port))
    except WireError:
        return ""
