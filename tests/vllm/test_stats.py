"""Statistics on their way through vLLM's hooks to Prometheus: nothing is lost, nothing is counted twice."""

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvplan.session.stats import MAX_PEERS, Stats
from kvplan.vllm.stats import Differences, PrometheusStats, StepStats

LABELS = {0: ["tiny", "0"], 1: ["tiny", "1"]}


def exporter():
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    return PrometheusStats(SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], LABELS)


def exported(engine="0"):
    """Return our samples of one engine by name and remaining label."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(REGISTRY).decode()):
        for sample in family.samples:
            if sample.name.startswith("kvplan_") and sample.labels.get("engine") == engine:
                rest = [v for k, v in sample.labels.items() if k not in {"engine", "model_name"}]
                found[(sample.name, *rest)] = sample.value
    return found


def worked():
    """Return the stats of a session that has done something of everything."""
    stats = Stats()
    stats.add("reads", 3)
    stats.receive(1000, "10.0.0.1:5600")
    stats.fail("expired", "10.0.0.1:5600")
    stats.refuse("unknown")
    stats.set("live_reads", 2)
    for seconds in (0.0002, 0.003, 0.003, 7.0, 100.0):
        stats.observe("transfer_seconds", seconds)
    stats.observe("read_seconds", 0.004)
    return stats


def test_what_a_session_counts_is_what_is_exported():
    stats, differences, prometheus = worked(), Differences(), exporter()
    prometheus.observe(differences.take(stats.snapshot()).data)
    stats.add("reads", 4)
    stats.observe("transfer_seconds", 0.04)
    prometheus.observe(differences.take(stats.snapshot()).data)
    found = exported()
    assert found["kvplan_reads_total",] == 7
    assert found["kvplan_received_bytes_total",] == 1000
    assert found["kvplan_failures_total", "expired"] == 1
    assert found["kvplan_failures_total", "peer_gone"] == 0
    assert found["kvplan_refusals_total", "unknown"] == 1
    assert found["kvplan_peer_received_bytes_total", "10.0.0.1:5600"] == 1000
    assert found["kvplan_live_reads",] == 2
    assert found["kvplan_transfer_seconds_count",] == 6
    assert found["kvplan_transfer_seconds_sum",] == pytest.approx(107.0462)
    snapshot = stats.snapshot()
    for bound in ("0.00025", "0.001", "0.005", "0.05", "5.0", "10.0", "60.0"):
        assert found["kvplan_transfer_seconds_bucket", bound] == snapshot[f"transfer_seconds.le.{bound}"], bound


def test_nothing_new_is_no_report_and_no_report_is_empty():
    stats, differences = worked(), Differences()
    assert differences.take(stats.snapshot()) is not None
    assert differences.take(stats.snapshot()) is None
    assert StepStats(data={"live_reads@0": 1}).is_empty()


def test_gauges_add_up_over_ranks_even_when_one_rank_is_silent():
    prometheus = exporter()
    first, second = Differences(), Differences()
    one, other = Stats(), Stats()
    one.set("live_offers", 3)
    other.set("live_offers", 5)
    both = first.take(one.snapshot(), 0).aggregate(second.take(other.snapshot(), 1))
    prometheus.observe(both.data)
    assert exported()["kvplan_live_offers",] == 8
    one.set("live_offers", 1)
    prometheus.observe(first.take(one.snapshot(), 0).data)
    assert exported()["kvplan_live_offers",] == 6


def test_counters_of_ranks_and_of_steps_add_up():
    differences = [Differences(), Differences()]
    reports = [differences[rank].take(worked().snapshot(), rank) for rank in (0, 1)]
    total = reports[0].aggregate(reports[1])
    assert total.data["reads"] == 6
    assert total.data["failures.expired"] == 2
    assert total.reduce()["reads_received"] == 2
    assert total.reduce()["failures.expired"] == 2
    assert total.reduce()["mean_read_ms"] == 4.0


def test_a_peer_that_made_room_and_came_back_counts_from_its_new_total():
    differences = Differences()
    assert differences.take({"peer_reads_received.a:1": 5.0}).data == {"peer_reads_received.a:1": 5.0}
    assert differences.take({}) is None
    assert differences.take({"peer_reads_received.a:1": 2.0}).data == {"peer_reads_received.a:1": 2.0}


def test_more_peers_than_may_have_a_series_become_other():
    prometheus = exporter()
    prometheus.observe({f"peer_reads_received.host{i}:1": 1 for i in range(MAX_PEERS + 10)})
    peers = {key[1]: value for key, value in exported().items() if key[0] == "kvplan_peer_reads_received_total"}
    assert len(peers) == MAX_PEERS + 1
    assert peers["other"] == 10


def test_an_engine_may_be_made_again_in_one_process():
    exporter().observe({"reads": 1})
    exporter().observe({"reads": 2}, engine_idx=1)
    assert exported("1")["kvplan_reads_total",] == 2
    assert exported("0")["kvplan_reads_total",] == 0


def test_names_of_another_version_are_ignored():
    exporter().observe({"a_number_of_the_future": 7, "another.le.0.5": 1})
