"""What a session counts: counters, gauges and one histogram, by name. No exporting.

Counters are written by one thread each and read by any; a reader may be one event behind.
"""

from __future__ import annotations

import threading
from bisect import bisect_left

COUNTERS = {
    "aborts_unknown": "cancels of reads that are not running",
    "claims_granted": "claims that this producer granted",
    "claims_refused": "claims that this producer refused",
    "descriptors": "descriptors of reads that arrived",
    "done_duplicates": "done messages that said nothing new",
    "done_strangers": "done messages of readers that the plan does not name, or of another read",
    "duplicates_ignored": "offers and reads with an id that is live already",
    "expiries": "offers whose lease ended before every reader was done",
    "handshakes": "hellos that led to a proved plan",
    "handshakes_refused": "hellos of engines that must not exchange cache with this one",
    "heartbeats": "renewal messages sent",
    "leases_renewed": "leases that a renewal of a consumer extended",
    "loop_errors": "unexpected errors that a session thread survived",
    "malformed_messages": "frames from peers that are no messages of ours",
    "offers": "requests offered",
    "offers_ended": "offers that ended, however",
    "overloads": "commands or messages refused because a bounded queue was full",
    "pieces_retried": "batches that were read again after a failure",
    "reads": "reads that began",
    "reads_failed": "reads that failed, all reasons",
    "reads_received": "reads that succeeded",
    "received_bytes": "bytes of reads that succeeded",
    "releases": "offers that a consumer released without reading",
    "stale_references": "claims of ended, unknown or superseded offers",
    "unexpected_messages": "messages that are late, or answer nothing",
}
"""Every counter, with its meaning."""

GAUGES = {
    "live_offers": "offers whose blocks are kept",
    "live_peers": "engines that reads are or were made from",
    "live_reads": "reads that have not been reported",
    "parked_messages": "claims and notices that wait for their offer",
    "quarantined_reads": "failed reads that wait for a write into their blocks to end",
}
"""Every gauge, with its meaning."""

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram ``read_seconds``: from the first claim to the last byte."""


class Stats:
    """Counters, gauges and a histogram of one session.

    >>> stats = Stats()
    >>> stats.add("reads"), stats.add("received_bytes", 100), stats.fail("expired")
    (None, None, None)
    >>> [stats.snapshot()[name] for name in ("reads", "received_bytes", "failures.expired")]
    [1.0, 100.0, 1.0]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys([*COUNTERS, *GAUGES], 0.0)
        self._buckets = [0] * (len(SECONDS_BUCKETS) + 1)
        self._seconds = 0.0

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name] += amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name] = value

    def fail(self, reason: str) -> None:
        """Count a failed read by its reason, as ``failures.<reason>``."""
        name = f"failures.{reason}"
        with self._lock:
            self._values["reads_failed"] += 1
            self._values[name] = self._values.get(name, 0) + 1

    def observe(self, seconds: float) -> None:
        """Add one read's duration to the histogram."""
        with self._lock:
            self._buckets[bisect_left(SECONDS_BUCKETS, seconds)] += 1
            self._seconds += seconds

    def snapshot(self) -> dict[str, float]:
        """Return every value by name; the histogram as ``read_seconds.le.BOUND`` (cumulative), ``.count``, ``.sum``."""
        with self._lock:
            values = {name: float(value) for name, value in self._values.items()}
            total = 0
            for bound, count in zip((*map(str, SECONDS_BUCKETS), "inf"), self._buckets, strict=True):
                total += count
                values[f"read_seconds.le.{bound}"] = float(total)
            values["read_seconds.count"] = float(total)
            values["read_seconds.sum"] = self._seconds
        return values
