"""What a session counts, where it goes, and the line that a failure leaves: bounded, exact, queryable."""

import logging
import shlex
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvplan.errors import DescriptionError, SessionError
from kvplan.session.advice import ADVICE, logfmt
from kvplan.session.declared import METRICS, SECONDS_BUCKETS, Kind, sample
from kvplan.session.metrics import SessionCollector, serve_metrics
from kvplan.session.nouns import REASONS, Failure, ReadRequest, RemoteRef
from kvplan.session.replay import representatives
from kvplan.session.reports import Reports
from kvplan.session.stats import MAX_NOTES, MAX_PEERS, MAX_REASONS, OTHER, PEER_IDLE_S, Stats
from kvplan.testing.clock import FakeClock


def scraped(registry):
    with serve_metrics(registry, port=0) as server:
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5).read().decode()
    families = list(text_string_to_metric_families(text))
    return families, {(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples}


def test_every_declared_metric_is_exported_with_its_kind_and_meaning():
    registry = CollectorRegistry()
    registry.register(SessionCollector(Stats().snapshot, {"engine": "prefill-0"}))
    families, _ = scraped(registry)
    found = {family.name: family for family in families}
    for metric in METRICS.values():
        family = found[metric.prometheus.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        if metric.unit and metric.kind is not Kind.COUNTER:
            assert metric.name.endswith(metric.unit) or metric.name.startswith(metric.unit), metric.name
    assert {name for name in found if name.startswith("kvplan_")} == {
        metric.prometheus.removesuffix("_total") for metric in METRICS.values()
    }


def test_a_snapshot_holds_only_what_is_declared():
    stats = Stats()
    stats.fail("expired", "a:1")
    stats.refuse("unknown")
    stats.receive(5, "b:1")
    stats.observe("read_seconds", 0.1)
    assert all(sample(name) for name in stats.snapshot())


def test_what_is_scraped_is_what_was_counted():
    one, other = Stats(), Stats()
    one.add("reads", 2)
    one.fail("expired", "10.0.0.1:5600")
    one.observe("claim_seconds", 0.003)
    other.set("live_offers", 4)
    registry = CollectorRegistry()
    collector = SessionCollector(one.snapshot, {"rank": "0"}).add(other.snapshot, {"rank": "1"})
    registry.register(collector)
    _, values = scraped(registry)
    assert values["kvplan_reads_total", ("rank", "0")] == 2
    assert values["kvplan_reads_total", ("rank", "1")] == 0
    assert values["kvplan_failures_total", ("rank", "0"), ("reason", "expired")] == 1
    assert values["kvplan_failures_total", ("rank", "0"), ("reason", "peer_gone")] == 0
    assert values["kvplan_refusals_total", ("rank", "1"), ("reason", "unknown")] == 0
    assert values["kvplan_peer_reads_failed_total", ("peer", "10.0.0.1:5600"), ("rank", "0")] == 1
    assert values["kvplan_live_offers", ("rank", "1")] == 4
    assert values["kvplan_claim_seconds_bucket", ("le", "0.0025"), ("rank", "0")] == 0
    assert values["kvplan_claim_seconds_bucket", ("le", "0.005"), ("rank", "0")] == 1
    assert values["kvplan_claim_seconds_sum", ("rank", "0")] == pytest.approx(0.003)


def test_sessions_of_one_collector_have_the_same_labels():
    with pytest.raises(DescriptionError, match="are not those of the first"):
        SessionCollector(Stats().snapshot, {"rank": "0"}).add(Stats().snapshot, {"engine": "a"})


def test_a_port_that_is_taken_is_a_sentence():
    with serve_metrics(CollectorRegistry(), port=0) as server:
        with pytest.raises(SessionError, match=f"metrics cannot be served on 127.0.0.1:{server.port}"):
            serve_metrics(CollectorRegistry(), port=server.port)
        server.close()


def test_peers_beyond_the_bound_are_other_until_one_is_idle():
    clock = FakeClock(0.0)
    stats = Stats(clock=clock)
    for number in range(MAX_PEERS):
        stats.receive(1, f"host{number}:1")
        clock.advance(1.0)
    stats.receive(10, "late:1")
    assert stats.snapshot()[f"peer_received_bytes.{OTHER}"] == 10
    assert "peer_received_bytes.late:1" not in stats.snapshot()
    clock.advance(PEER_IDLE_S - MAX_PEERS + 1)
    stats.receive(100, "late:1")
    found = stats.snapshot()
    assert found["peer_received_bytes.late:1"] == 100
    assert "peer_received_bytes.host0:1" not in found
    assert found["peer_received_bytes.host1:1"] == 1
    assert found["received_bytes"] == MAX_PEERS + 110


def test_reasons_and_notes_are_bounded():
    stats = Stats()
    for number in range(500):
        stats.fail(f"made up {number}")
        stats.refuse(f"made up {number}")
    assert len([name for name in stats.snapshot() if name.startswith(("failures.", "refusals."))]) < 200
    assert stats.snapshot()["reads_failed"] == 500
    assert sum(value for name, value in stats.snapshot().items() if name.startswith("failures.")) == 500
    reports = Reports(stats)
    for number in range(2 * MAX_NOTES):
        reports.failed(request(f"r{number}"), Failure("expired"))
    assert len(stats.recent_failures()) == MAX_NOTES
    assert stats.recent_failures()[0][1].request_id == f"r{2 * MAX_NOTES - 1}"


@given(st.lists(st.floats(1e-5, 300), min_size=1, max_size=60))
def test_representatives_fill_the_same_buckets_and_have_the_same_sum(durations):
    stats, again = Stats(), Stats()
    for seconds in durations:
        stats.observe("read_seconds", seconds)
    snapshot = stats.snapshot()
    parts = {name.partition(".")[2]: value for name, value in snapshot.items() if name.startswith("read_seconds.")}
    for seconds, count in representatives(parts):
        for _ in range(count):
            again.observe("read_seconds", seconds)
    found = again.snapshot()
    for bound in (*SECONDS_BUCKETS, "inf"):
        assert found[f"read_seconds.le.{bound}"] == snapshot[f"read_seconds.le.{bound}"]
    # A lone observation at a bucket's lower edge is moved a millionth of the bucket into it.
    assert found["read_seconds.sum"] == pytest.approx(snapshot["read_seconds.sum"], rel=1e-4)


def request(name, host="10.0.0.1"):
    return ReadRequest(name, RemoteRef("prefill-0", host, 5600, "cmpl-1", "g1", (), 5), ())


def test_a_failure_leaves_one_line_that_a_machine_can_read(caplog):
    with caplog.at_level(logging.WARNING, logger="kvplan"):
        Reports(Stats()).failed(request("local-1"), Failure("expired", 'rank 0 says "too late"\nand more'))
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert "\n" not in line
    event, _, rest = line.partition(" request=")
    assert event == "read failed"
    fields = dict(part.split("=", 1) for part in shlex.split("request=" + rest))
    assert fields["request"] == "local-1"
    assert fields["remote_request"] == "cmpl-1"
    assert (fields["peer"], fields["at"], fields["reason"]) == ("prefill-0", "10.0.0.1:5600", "expired")
    assert fields["meaning"] == REASONS["expired"]
    assert fields["do"] == ADVICE["expired"]


def test_an_address_that_cannot_be_meant_gets_no_label():
    stats = Stats()
    Reports(stats).failed(request("r", host="no host\nat all" * 100), Failure("handshake_failed"))
    assert not [name for name in stats.snapshot() if name.startswith("peer_")]


def test_every_reason_says_what_to_do_and_is_there_before_it_happens():
    assert ADVICE.keys() == REASONS.keys()
    assert set(METRICS["failures"].known) == REASONS.keys()
    assert set(METRICS["refusals"].known) <= REASONS.keys()
    assert len(REASONS) < MAX_REASONS


@given(st.text())
def test_a_log_value_stays_in_its_line_and_its_field(text):
    line = logfmt("event", a=text, b="end")
    assert len(line.splitlines()) == 1
    assert line.endswith(" b=end")
