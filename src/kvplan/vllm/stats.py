"""Statistics for vLLM's log line and for Prometheus: a session's numbers, as differences of two looks. No counting.

Every counter of ``kvplan.session.stats`` becomes ``kvplan_<name>_total``, every gauge ``kvplan_<name>``; failures are
labelled by reason, and ``kvplan_read_seconds`` has the session's buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvplan.session.stats import COUNTERS, GAUGES

_FAILURES = "failures."
_SECONDS = "read_seconds."


@dataclass
class StepStats(KVConnectorStats):
    """Counters since the last report, gauges as they are; ``data`` maps names to numbers."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, or a later, report; of two gauges the later counts."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's periodic log line shows."""
        reads = self.data.get("read_seconds.count", 0)
        shown = ("reads_received", "reads_failed", "received_bytes", "descriptors", "offers", "expiries")
        line: dict[str, int | float] = {name: self.data[name] for name in shown if self.data.get(name)}
        if reads:
            line["mean_read_ms"] = round(self.data.get("read_seconds.sum", 0) / reads * 1e3, 3)
        return line

    def is_empty(self) -> bool:
        """Return whether nothing has happened."""
        return not any(value for name, value in self.data.items() if name not in GAUGES)


class Differences:
    """Turns running totals into differences between two looks."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def take(self, totals: dict[str, float]) -> StepStats | None:
        """Return what changed since the last call, or None."""
        changed = {
            name: value if name in GAUGES else value - self._seen.get(name, 0)
            for name, value in totals.items()
            if value != self._seen.get(name, 0)
        }
        self._seen = totals
        return StepStats(data=changed) if changed else None


class PrometheusStats(KVConnectorPromMetrics):
    """The session's numbers as Prometheus metrics, by engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._labels = labelnames
        self._counters = {name: self._counter(name, text) for name, text in COUNTERS.items()}
        self._gauges = {name: self._gauge(name, text) for name, text in GAUGES.items()}
        self._failures = self._counter_cls(
            name="kvplan:failures", documentation="reads that failed, by reason", labelnames=[*labelnames, "reason"]
        )
        self._read_seconds = self._counter("read_seconds_sum", "seconds from a read's first claim to its last byte")

    def _counter(self, name: str, text: str) -> Any:
        counter = self._counter_cls(name=f"kvplan:{name}", documentation=text, labelnames=self._labels)
        return create_metric_per_engine(counter, self.per_engine_labelvalues)

    def _gauge(self, name: str, text: str) -> Any:
        gauge = self._gauge_cls(name=f"kvplan:{name}", documentation=text, labelnames=self._labels)
        return create_metric_per_engine(gauge, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report of an engine."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(max(0, value))
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)
            elif name.startswith(_FAILURES):
                labels = self.per_engine_labelvalues[engine_idx]
                self._failures.labels(*labels, name.removeprefix(_FAILURES)).inc(max(0, value))
            elif name == f"{_SECONDS}sum":
                self._read_seconds[engine_idx].inc(max(0, value))
