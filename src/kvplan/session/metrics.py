"""Prometheus metrics of a session outside an engine: a collector, and a server for who has none. No counting.

::

    registry = CollectorRegistry()
    registry.register(SessionCollector(session.stats, {"engine": "prefill-0", "rank": "0"}))
    server = serve_metrics(registry, host="127.0.0.1", port=9400)      # GET /metrics

Nothing is copied until somebody scrapes, and a scrape takes one snapshot. Inside vLLM the same metrics, under the same
names, go through vLLM's own hooks instead (``kvplan.vllm.stats``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvplan.errors import DescriptionError, SessionError
from kvplan.session.declared import METRICS, SECONDS_BUCKETS, Kind, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric as Family
    from typing_extensions import Self

    from kvplan.session.declared import Metric


class SessionCollector(Collector):
    """Offers one or more sessions' numbers to a registry, each with labels of its own (the same names for all)."""

    def __init__(self, stats: Callable[[], Mapping[str, float]], labels: Mapping[str, str] | None = None) -> None:
        self._sources = [(stats, dict(labels or {}))]

    def add(self, stats: Callable[[], Mapping[str, float]], labels: Mapping[str, str]) -> Self:
        """Offer another session's numbers too, told apart by its labels."""
        if labels.keys() != self._sources[0][1].keys():
            raise DescriptionError(f"labels {sorted(labels)} are not those of the first: {sorted(self._sources[0][1])}")
        self._sources.append((stats, dict(labels)))
        return self

    def collect(self) -> Iterable[Family]:
        """Return every declared metric, from one snapshot of each session."""
        names = list(self._sources[0][1])
        families = {name: _family(metric, names) for name, metric in METRICS.items()}
        for stats, labels in self._sources:
            _fill(families, stats(), [labels[name] for name in names])
        return families.values()

    def describe(self) -> Iterable[Family]:
        """Return the metrics without values, so that registering takes no snapshot."""
        return [_family(metric, []) for metric in METRICS.values()]


class MetricsServer:
    """Serves ``/metrics`` until it is closed. A context manager."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise SessionError(f"metrics cannot be served on {host}:{port}: {error}") from error
        self.port = int(self._server.server_port)
        """The port that is bound."""

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(registry: CollectorRegistry, *, host: str = "127.0.0.1", port: int = 9400) -> MetricsServer:
    """Start a thread that serves a registry at ``http://host:port/metrics``; port 0 takes a free one."""
    return MetricsServer(registry, host=host, port=port)


def _family(metric: Metric, names: list[str]) -> Family:
    labels = [*names, *filter(None, [metric.label])]
    if metric.kind is Kind.GAUGE:
        return GaugeMetricFamily(metric.prometheus, metric.help, labels=labels)
    if metric.kind is Kind.HISTOGRAM:
        return HistogramMetricFamily(metric.prometheus, metric.help, labels=labels)
    return CounterMetricFamily(metric.prometheus, metric.help, labels=labels)


def _fill(families: Mapping[str, Family], values: Mapping[str, float], labels: list[str]) -> None:
    """Add one snapshot to the families."""
    for name, value in values.items():
        found = sample(name)
        if found is None:
            continue
        family = families[found.metric.name]
        if isinstance(family, CounterMetricFamily | GaugeMetricFamily):
            family.add_metric([*labels, *filter(None, [found.part])], value)
    for name, metric in METRICS.items():
        family = families[name]
        if metric.kind is Kind.HISTOGRAM and isinstance(family, HistogramMetricFamily):
            bounds = [*map(str, SECONDS_BUCKETS), "inf"]
            buckets = [("+Inf" if bound == "inf" else bound, values.get(f"{name}.le.{bound}", 0.0)) for bound in bounds]
            family.add_metric(labels, buckets, values.get(f"{name}.sum", 0.0))
