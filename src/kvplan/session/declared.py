"""Every number that a session reports, declared once: name, kind, meaning, label, unit. No counting, no exporting.

The name in a snapshot is ``name``, or ``name.VALUE`` for a labelled counter; a histogram has ``name.le.BOUND``
(cumulative), ``name.count`` and ``name.sum``. The name for Prometheus follows from it: ``kvplan_name``, and
``kvplan_name_total`` for a counter.

>>> METRICS["received_bytes"].prometheus, METRICS["failures"].label
('kvplan_received_bytes_total', 'reason')
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvplan.session.nouns import REASONS

PREFIX = "kvplan_"

SECONDS_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of every histogram of seconds."""


REFUSALS = (
    "claimed_by_another", "closing", "expired", "not_elected", "overloaded", "released", "stale_generation",
    "tables_differ", "unknown", "withdrawn",
)  # fmt: skip
"""Why a producer refuses a claim."""


class Kind(Enum):
    """How a number behaves."""

    COUNTER = "counter"
    """Only grows, from 0 at the start of the process."""
    GAUGE = "gauge"
    """What is so right now."""
    HISTOGRAM = "histogram"
    """Durations, by bucket."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One declaration."""

    name: str
    """In snapshots."""
    kind: Kind
    help: str
    """What is counted, for a person."""
    label: str = ""
    """Name of its one label; empty for none."""
    unit: str = ""
    """``bytes`` or ``seconds``; empty for things that are counted."""
    known: tuple[str, ...] = ()
    """Values of the label that are there from the start, at 0: else the first event of a kind would go unseen, because
    a series that begins at 1 has not grown."""

    @property
    def prometheus(self) -> str:
        """Its name for Prometheus; a histogram's series add ``_bucket``, ``_sum`` and ``_count``."""
        return PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")


def _counter(name: str, text: str, *, label: str = "", unit: str = "", known: tuple[str, ...] = ()) -> Metric:
    return Metric(name, Kind.COUNTER, text, label, unit, known)


def _gauge(name: str, text: str, *, unit: str = "") -> Metric:
    return Metric(name, Kind.GAUGE, text, "", unit)


def _seconds(name: str, text: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, "", "seconds")


_DECLARED = (
    # Reading side
    _counter("reads", "reads that began"),
    _counter("reads_received", "reads that succeeded"),
    _counter("reads_failed", "reads that failed, all reasons"),
    _counter("failures", "reads that failed, by reason", label="reason", known=tuple(REASONS)),
    _counter("received_bytes", "bytes of reads that succeeded", unit="bytes"),
    _counter("descriptors", "descriptors of reads that arrived"),
    _counter("transfers", "batches that a transport brought here, staged ones included"),
    _counter("transferred_bytes", "bytes of such batches, gaps and repetitions included", unit="bytes"),
    _counter("staged_bytes", "bytes that went through the staging area", unit="bytes"),
    _counter("pieces_retried", "batches that were read again after a failure"),
    _counter("reads_verified", "reads whose digests were the producer's"),
    _counter("digest_mismatches", "reads that brought other bytes than the producer's"),
    _counter("handshakes", "hellos that led to a proved plan"),
    _counter("handshakes_refused", "hellos of engines that must not exchange cache with this one"),
    _counter("heartbeats", "renewal messages sent"),
    _counter("aborts_unknown", "cancels of reads that are not running"),
    _counter("peer_reads_received", "reads that succeeded, by the peer's front desk", label="peer"),
    _counter("peer_reads_failed", "reads that failed, by the peer's front desk", label="peer"),
    _counter("peer_received_bytes", "bytes of reads that succeeded, by the peer's front desk", label="peer",
             unit="bytes"),
    _seconds("handshake_seconds", "from the first question to a peer's front desk to the proved plan"),
    _seconds("claim_seconds", "from a claim to its grant"),
    _seconds("transfer_seconds", "from a batch's post to its arrival"),
    _seconds("scatter_seconds", "from a staged batch's arrival until its bytes lie in their blocks"),
    _seconds("read_seconds", "from a read's first claim to its success"),
    _seconds("verify_seconds", "from a verified read's last byte to the verdict"),
    _seconds("digest_seconds", "of work on the digests of one question, on either side"),
    _gauge("live_peers", "engines that reads are or were made from"),
    _gauge("live_reads", "reads that have not been reported"),
    _gauge("quarantined_reads", "failed reads that wait for a write into their blocks to end"),
    _gauge("transfers_in_flight", "batches whose bytes may still be written"),
    _gauge("bytes_in_flight", "bytes of such batches", unit="bytes"),
    _gauge("staging_bytes", "size of the staging area; 0 until the first read needs it", unit="bytes"),
    _gauge("staging_slots_used", "slots of the staging area that hold a batch"),
    # Offering side
    _counter("offers", "requests offered"),
    _counter("offers_ended", "offers that ended, however"),
    _counter("expiries", "offers whose lease ended before every reader was done"),
    _counter("claims_granted", "claims that this producer granted"),
    _counter("claims_refused", "claims that this producer refused, all reasons"),
    _counter("refusals", "claims that this producer refused, by reason", label="reason", known=REFUSALS),
    _counter("stale_references", "claims of ended, unknown or superseded offers"),
    _counter("leases_renewed", "leases that a renewal of a consumer extended"),
    _counter("releases", "offers that a consumer released without reading"),
    _counter("digests_answered", "questions for digests that this producer answered"),
    _counter("done_duplicates", "done messages that said nothing new"),
    _counter("done_strangers", "done messages of readers that the plan does not name, or of another read"),
    _gauge("live_offers", "offers whose blocks are kept: leases that run"),
    _gauge("parked_messages", "claims and notices that wait for their offer"),
    # Either side
    _counter("duplicates_ignored", "offers and reads with an id that is live already"),
    _counter("malformed_messages", "frames from peers that are no messages of ours"),
    _counter("unexpected_messages", "messages that are late, or answer nothing"),
    _counter("overloads", "commands or messages refused because a bounded queue was full"),
    _counter("loop_errors", "unexpected errors that a session thread survived"),
    _counter("status_requests", "questions of kvplan top and the like that were answered"),
)  # fmt: skip

METRICS = {metric.name: metric for metric in _DECLARED}
"""Every declaration by name, in the order of the tables that people read."""


class Sample(NamedTuple):
    """One entry of a snapshot, taken apart."""

    metric: Metric
    part: str
    """The label's value, or ``le.BOUND``, ``count``, ``sum`` of a histogram; empty for a plain number."""


def sample(name: str) -> Sample | None:
    """Return what a snapshot's entry is; None for a name that is not declared.

    >>> found = sample("failures.peer_gone")
    >>> found.metric.name, found.part
    ('failures', 'peer_gone')
    """
    base, _, part = name.partition(".")
    metric = METRICS.get(base)
    return None if metric is None else Sample(metric, part)
