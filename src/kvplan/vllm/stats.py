"""Statistics for vLLM's log line and for Prometheus: a session's numbers, as differences of two looks. No counting.

What is declared in ``kvplan.session.declared`` is exported, under the names stated there and with vLLM's labels, so one
dashboard serves an engine and the library alone. On the way from the workers to the process that exports:

* a counter or a histogram's bucket is its growth, which adds up over ranks and time;
* a gauge is its value and carries its rank, as ``name@rank``, because a rank that has not changed says nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvplan.session.declared import METRICS, SECONDS_BUCKETS, Kind, sample
from kvplan.session.replay import representatives
from kvplan.session.stats import GAUGES, MAX_PEERS, MAX_REASONS, OTHER

if TYPE_CHECKING:
    from kvplan.session.declared import Metric

AT_RANK = "@"
"""Between the name of a gauge and the rank that it is of."""

_registered: list[Any] = []
"""Collectors of this module in the process's registry. vLLM removes only its own when an engine is made again."""


@dataclass
class StepStats(KVConnectorStats):
    """Counters since the last report, gauges as they are; ``data`` maps names to numbers."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, or a later, report; of two values of one rank's gauge the later counts."""
        for name, value in other.data.items():
            self.data[name] = value if AT_RANK in name else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's periodic log line shows."""
        reads = self.data.get("read_seconds.count", 0)
        shown = ("reads_received", "reads_failed", "received_bytes", "descriptors", "offers", "expiries")
        line: dict[str, int | float] = {name: self.data[name] for name in shown if self.data.get(name)}
        line |= {name: value for name, value in self.data.items() if name.startswith("failures.") and value}
        if reads:
            line["mean_read_ms"] = round(self.data.get("read_seconds.sum", 0) / reads * 1e3, 3)
        return line

    def is_empty(self) -> bool:
        """Return whether nothing has happened."""
        return not any(value for name, value in self.data.items() if AT_RANK not in name)


class Differences:
    """Turns running totals into differences between two looks."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def take(self, totals: dict[str, float], rank: int = 0) -> StepStats | None:
        """Return what changed since the last call, or None. A total that begins anew counts from 0."""
        changed: dict[str, float] = {}
        for name, value in totals.items():
            before = self._seen.get(name, 0.0)
            if value != before:
                grown = value - before if value > before else value
                changed[f"{name}{AT_RANK}{rank}" if name in GAUGES else name] = value if name in GAUGES else grown
        self._seen = totals
        return StepStats(data=changed) if changed else None


class PrometheusStats(KVConnectorPromMetrics):
    """The session's numbers as Prometheus metrics, by engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        _forget_registered()
        self._collectors = {name: self._collector(metric, labelnames) for name, metric in METRICS.items()}
        _registered.extend(self._collectors.values())
        self._plain = {
            name: create_metric_per_engine(self._collectors[name], per_engine)
            for name, metric in METRICS.items()
            if not metric.label
        }
        self._labels: dict[str, set[str]] = {}
        for metric in METRICS.values():
            for engine_idx in per_engine:
                for value in metric.known:
                    self._labelled(metric, engine_idx, value).inc(0)
        self._gauges: dict[tuple[str, int], dict[str, float]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report of an engine."""
        histograms: dict[str, dict[str, float]] = {}
        for name, value in transfer_stats_data.items():
            base, _, rank = name.partition(AT_RANK)
            found = sample(base if base in GAUGES else name)
            if found is None:
                continue
            metric, part = found
            if metric.kind is Kind.GAUGE:
                self._set(metric.name, engine_idx, rank, value)
            elif metric.kind is Kind.HISTOGRAM:
                histograms.setdefault(metric.name, {})[part] = value
            elif metric.label:
                self._labelled(metric, engine_idx, part).inc(max(0, value))
            else:
                self._plain[metric.name][engine_idx].inc(max(0, value))
        for name, parts in histograms.items():
            for seconds, count in representatives(parts):
                for _ in range(count):
                    self._plain[name][engine_idx].observe(seconds)

    def _collector(self, metric: Metric, labelnames: list[str]) -> Any:
        name, labels = metric.prometheus, [*labelnames, *filter(None, [metric.label])]
        if metric.kind is Kind.GAUGE:
            return self._gauge_cls(
                name=name, documentation=metric.help, labelnames=labels, multiprocess_mode="mostrecent"
            )
        if metric.kind is Kind.HISTOGRAM:
            buckets = list(SECONDS_BUCKETS)
            return self._histogram_cls(name=name, documentation=metric.help, labelnames=labels, buckets=buckets)
        return self._counter_cls(name=name.removesuffix("_total"), documentation=metric.help, labelnames=labels)

    def _set(self, name: str, engine_idx: int, rank: str, value: float) -> None:
        """Show the sum over the engine's ranks."""
        by_rank = self._gauges.setdefault((name, engine_idx), {})
        by_rank[rank] = value
        self._plain[name][engine_idx].set(sum(by_rank.values()))

    def _labelled(self, metric: Metric, engine_idx: int, value: str) -> Any:
        """Return the child for one label value; beyond a bounded number of them, that of ``other``."""
        known = self._labels.setdefault(metric.name, set())
        if value not in known and len(known) >= (MAX_PEERS if metric.label == "peer" else MAX_REASONS):
            value = OTHER
        known.add(value)
        return self._collectors[metric.name].labels(*self.per_engine_labelvalues[engine_idx], value)


def _forget_registered() -> None:
    """Take our collectors out of the process's registry: a name may be in it once."""
    while _registered:
        with suppress(KeyError):
            REGISTRY.unregister(_registered.pop())
