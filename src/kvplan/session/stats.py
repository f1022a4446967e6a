"""What a session counts, by the names of ``declared``: a bounded store behind one lock. No exporting.

Numbers are written by the session's threads and read by any; a reader may be one event behind. Labels are bounded:
reasons by their table, peers by ``MAX_PEERS`` front desks at one time, the rest being ``other``.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

from kvplan.session.declared import METRICS, SECONDS_BUCKETS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PEERS = 32
"""Front desks with numbers of their own; further ones are counted together as ``other``."""
PEER_IDLE_S = 600.0
"""A front desk without a read for so long makes room for another; its series ends."""
MAX_REASONS = 64
"""Reasons with numbers of their own: more than there are."""
OTHER = "other"
MAX_NOTES = 32
"""Failures that are remembered for people to look at."""

COUNTERS = {m.name: m.help for m in METRICS.values() if m.kind is Kind.COUNTER and not m.label}
"""Every counter without a label, with its meaning."""
GAUGES = {m.name: m.help for m in METRICS.values() if m.kind is Kind.GAUGE}
"""Every gauge, with its meaning."""
HISTOGRAMS = {m.name: m.help for m in METRICS.values() if m.kind is Kind.HISTOGRAM}
"""Every histogram, with its meaning."""
_BOUNDS = (*map(str, SECONDS_BUCKETS), "inf")


class FailureNote(NamedTuple):
    """One read that failed, as people see it."""

    request_id: str
    engine_id: str
    address: str
    reason: str
    detail: str


class _Histogram:
    """Durations by bucket."""

    def __init__(self) -> None:
        self.buckets = [0] * len(_BOUNDS)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.seconds += seconds


class _Peers:
    """Numbers by front desk, for a bounded number of front desks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used_at: OrderedDict[str, float] = OrderedDict()
        self.values: dict[str, float] = {}

    def add(self, name: str, peer: str, amount: float) -> None:
        key = f"{name}.{self._label(peer)}"
        self.values[key] = self.values.get(key, 0.0) + amount

    def _label(self, peer: str) -> str:
        now = self._clock()
        if peer not in self._used_at and len(self._used_at) >= MAX_PEERS:
            idle, used_at = next(iter(self._used_at.items()))
            if used_at + PEER_IDLE_S > now:
                return OTHER
            del self._used_at[idle]
            self.values = {key: value for key, value in self.values.items() if key.partition(".")[2] != idle}
        self._used_at[peer] = now
        self._used_at.move_to_end(peer)
        return peer


class Stats:
    """Counters, gauges and histograms of one session.

    >>> stats = Stats()
    >>> stats.add("reads"), stats.add("received_bytes", 100), stats.fail("expired", "10.0.0.1:5600")
    (None, None, None)
    >>> [stats.snapshot()[name] for name in ("reads", "received_bytes", "failures.expired", "reads_failed")]
    [1.0, 100.0, 1.0, 1.0]
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys([*COUNTERS, *GAUGES], 0.0)
        self._reasons = {f"{m.name}.{value}": 0.0 for m in METRICS.values() for value in m.known}
        self._histograms = {name: _Histogram() for name in HISTOGRAMS}
        self._peers = _Peers(clock)
        self._clock = clock
        self._notes: deque[tuple[float, FailureNote]] = deque(maxlen=MAX_NOTES)

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name] += amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name] = value

    def fail(self, reason: str, peer: str = "") -> None:
        """Count a failed read, by its reason and by the front desk that it was to come from."""
        with self._lock:
            self._values["reads_failed"] += 1
            self._by_reason("failures", reason)
            if peer:
                self._peers.add("peer_reads_failed", peer, 1)

    def receive(self, num_bytes: int, peer: str = "") -> None:
        """Count a read that succeeded, by the front desk that it came from."""
        with self._lock:
            self._values["reads_received"] += 1
            self._values["received_bytes"] += num_bytes
            if peer:
                self._peers.add("peer_reads_received", peer, 1)
                self._peers.add("peer_received_bytes", peer, num_bytes)

    def refuse(self, reason: str) -> None:
        """Count a refused claim, by its reason."""
        with self._lock:
            self._values["claims_refused"] += 1
            self._by_reason("refusals", reason)

    def observe(self, name: str, seconds: float) -> None:
        """Add one duration to a histogram."""
        with self._lock:
            self._histograms[name].observe(max(0.0, seconds))

    def remember(self, note: FailureNote) -> None:
        """Keep what failed for people who ask."""
        with self._lock:
            self._notes.appendleft((self._clock(), note))

    def recent_failures(self) -> list[tuple[float, FailureNote]]:
        """Return the latest failures with their age in seconds, the latest first."""
        with self._lock:
            now = self._clock()
            return [(max(0.0, now - at), note) for at, note in self._notes]

    def snapshot(self) -> dict[str, float]:
        """Return every number by name, as ``declared`` says."""
        with self._lock:
            values = {name: float(value) for name, value in self._values.items()}
            values |= self._reasons
            values |= self._peers.values
            for name, histogram in self._histograms.items():
                total = 0
                for bound, count in zip(_BOUNDS, histogram.buckets, strict=True):
                    total += count
                    values[f"{name}.le.{bound}"] = float(total)
                values[f"{name}.count"] = float(total)
                values[f"{name}.sum"] = histogram.seconds
        return values

    def _by_reason(self, name: str, reason: str) -> None:
        key = f"{name}.{reason}"
        if key not in self._reasons and len(self._reasons) >= 2 * MAX_REASONS:
            key = f"{name}.{OTHER}"
        self._reasons[key] = self._reasons.get(key, 0.0) + 1
