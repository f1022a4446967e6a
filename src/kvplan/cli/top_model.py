"""What ``kvplan top`` shows, as plain values: the answers of an engine's ranks become one engine. No output.

A request is read and kept by several ranks at once; people think of it as one. So lines of one request are merged:
bytes add up, the slowest rank says what it waits for, the lease that ends first says how long is left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvplan.session.declared import SECONDS_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvplan.wire.status import FailureLine, LeaseLine, PeerLine, ReadLine, Status


@dataclass(frozen=True, slots=True)
class Sample:
    """What one engine said at one moment."""

    target: str
    at: float
    """On a monotonic clock, seconds."""
    desk: Status | None = None
    ranks: tuple[Status, ...] = ()
    errors: tuple[str, ...] = ()
    """Why the front desk, or some ranks, could not be asked."""

    @property
    def values(self) -> Counter[str]:
        """The ranks' numbers, added up."""
        total: Counter[str] = Counter()
        for status in self.ranks:
            total.update(status.values)
        return total

    def requests(self, name: str) -> int:
        """Return a number of requests: every rank has its part in each, so it is the most that any rank counts."""
        return int(max((status.values.get(name, 0.0) for status in self.ranks), default=0.0))


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened per second between two samples."""

    gigabytes: float = 0.0
    reads: float = 0.0
    failures: float = 0.0


@dataclass(frozen=True, slots=True)
class Read:
    """One request that is being read."""

    request_id: str
    engine_id: str
    state: str
    waits_for: str
    age_s: float
    num_bytes: int
    arrived_bytes: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Lease:
    """One request whose blocks are kept."""

    request_id: str
    state: str
    reader: str
    left_s: float
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Peer:
    """One remote engine."""

    engine_id: str
    address: str
    state: str
    detail: str
    num_reads: int
    reads_received: int
    reads_failed: int
    received_bytes: int


@dataclass(slots=True)
class History:
    """Samples of one engine over time, for rates."""

    samples: list[Sample] = field(default_factory=list)
    gigabytes: list[float] = field(default_factory=list)
    """GB/s of every interval, the latest last."""

    def add(self, sample: Sample, *, keep: int = 60) -> Rates:
        """Take a sample; return the rates since the one before it."""
        found = rates(self.samples[-1], sample) if self.samples else Rates()
        if self.samples:
            self.gigabytes = [*self.gigabytes, found.gigabytes][-keep:]
        self.samples = [sample]
        return found


def rates(before: Sample, after: Sample) -> Rates:
    """Return what happened per second; an engine that began anew counts from 0."""
    seconds = after.at - before.at
    if seconds <= 0:
        return Rates()

    def per_second(old: float, new: float) -> float:
        return (new - old if new >= old else new) / seconds

    received, failed = (
        per_second(before.requests(name), after.requests(name)) for name in ("reads_received", "reads_failed")
    )
    moved = per_second(before.values["transferred_bytes"], after.values["transferred_bytes"])
    return Rates(moved / 1e9, received, failed)


def merged_reads(ranks: Iterable[Status]) -> list[Read]:
    """Return the requests that are being read, the oldest first."""
    groups = _by_request(line for status in ranks for line in status.reads)
    found = []
    for lines in groups.values():
        slowest = max(lines, key=_slowness)
        found.append(
            Read(
                slowest.request_id, slowest.engine_id, slowest.state, slowest.waits_for,
                max(line.age_s for line in lines), sum(line.num_bytes for line in lines),
                sum(line.arrived_bytes for line in lines), len(lines),
            )
        )  # fmt: skip
    return sorted(found, key=lambda read: -read.age_s)


def merged_leases(ranks: Iterable[Status]) -> list[Lease]:
    """Return the requests whose blocks are kept, the soonest to end first."""
    groups = _by_request(line for status in ranks for line in status.leases)
    found = []
    for lines in groups.values():
        first = min(lines, key=lambda line: line.left_s)
        reader = next((line.reader for line in lines if line.reader), "")
        found.append(Lease(first.request_id, first.state, reader, first.left_s, len(lines)))
    return sorted(found, key=lambda lease: lease.left_s)


def merged_peers(ranks: Sequence[Status]) -> list[Peer]:
    """Return the remote engines, those with most bytes first; the worst state of any rank counts.

    Every rank has its part in each read: so reads are the most that any rank counts, and bytes are added up.
    """
    groups: dict[tuple[str, str], list[PeerLine]] = {}
    for status in ranks:
        for line in status.peers:
            groups.setdefault((line.engine_id, line.address), []).append(line)
    found = []
    for (engine_id, address), lines in groups.items():
        worst = max(lines, key=lambda line: _BADNESS.get(line.state, 0))
        received, failed, num_bytes = (
            [int(status.values.get(f"{name}.{address}", 0)) for status in ranks] for name in _PEER_COUNTERS
        )
        num_reads = max(line.num_reads for line in lines)
        counts = (num_reads, max(received), max(failed), sum(num_bytes))
        found.append(Peer(engine_id, address, worst.state, worst.detail, *counts))
    return sorted(found, key=lambda peer: (-peer.received_bytes, peer.engine_id))


def merged_failures(ranks: Iterable[Status]) -> list[tuple[FailureLine, int]]:
    """Return the latest failures with the number of ranks that had each, the latest first."""
    groups: dict[tuple[str, str], list[FailureLine]] = {}
    for status in ranks:
        for line in status.failures:
            groups.setdefault((line.request_id, line.reason), []).append(line)
    found = [(min(lines, key=lambda line: line.age_s), len(lines)) for lines in groups.values()]
    return sorted(found, key=lambda item: item[0].age_s)


def quantile(values: Mapping[str, float], name: str, share: float) -> float | None:
    """Return the upper bound of the bucket in which a share of a histogram's observations lies; None without any.

    >>> quantile({"read_seconds.count": 2, "read_seconds.le.0.25": 1, "read_seconds.le.0.5": 2}, "read_seconds", 0.5)
    0.25
    """
    total = values.get(f"{name}.count", 0)
    if not total:
        return None
    within = (bound for bound in SECONDS_BUCKETS if values.get(f"{name}.le.{bound}", 0) >= share * total)
    return next(within, float("inf"))


_BADNESS = {"ready": 0, "asking": 1, "suspect": 2, "refused": 3, "gone": 4}
_PEER_COUNTERS = ("peer_reads_received", "peer_reads_failed", "peer_received_bytes")


def _slowness(line: ReadLine) -> tuple[bool, bool, float]:
    return line.state == "waiting", line.arrived_bytes < line.num_bytes, line.age_s


def _by_request(lines: Iterable[_Line]) -> dict[str, list[_Line]]:
    groups: dict[str, list[_Line]] = {}
    for line in lines:
        groups.setdefault(line.request_id, []).append(line)
    return groups


if TYPE_CHECKING:
    from typing import TypeVar

    _Line = TypeVar("_Line", ReadLine, LeaseLine)
