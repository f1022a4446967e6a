"""The dashboard and the alert rules speak of names, labels and reasons that the code exports, and are well-formed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvplan.session import REASONS
from kvplan.session.metrics import SessionCollector
from kvplan.session.stats import Stats

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "dashboards" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
QUERIES = [
    *(
        pytest.param(target["expr"], id=f"panel {panel['id']}{target['refId']}")
        for panel in PANELS
        for target in panel["targets"]
    ),
    *(pytest.param(rule["expr"], id=rule["alert"]) for rule in RULES),
]
SCRAPED = {"job", "instance", "le"}
"""Labels that Prometheus and histograms bring."""


def exported():
    """Return sample names that the exporter gives, with their labels."""
    stats = Stats()
    stats.receive(1, "h:1")
    stats.fail("expired", "h:1")
    registry = CollectorRegistry()
    registry.register(SessionCollector(stats.snapshot))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


EXPORTED = exported()


def plain(expr):
    """Return a query as Prometheus gets it, Grafana's variables filled in."""
    for variable, value in (("$__rate_interval", "1m"), ("$__range", "1h"), ("$job", ".*"), ("$instance", ".*")):
        expr = expr.replace(variable, value)
    return expr


@pytest.mark.parametrize("expr", QUERIES)
def test_a_query_is_promql_over_what_is_exported(expr):
    promql_parser.parse(plain(expr))
    names = set(re.findall(r"\bkvplan_\w+", expr))
    assert names
    assert names <= EXPORTED.keys(), names - EXPORTED.keys()
    labels = set().union(*(EXPORTED[name] for name in names)) | SCRAPED
    for words in re.findall(r"\bby \(([^)]*)\)", expr):
        assert {word.strip() for word in words.split(",")} <= labels, words
    for label in re.findall(r"(\w+)\s*(?:=~|!~|=|!=)\s*\"", expr):
        assert label in labels, label


@pytest.mark.parametrize("expr", QUERIES)
def test_reasons_that_are_named_exist(expr):
    for reasons in re.findall(r"reason\s*(?:=~|!~|=|!=)\s*\"([^\"]*)\"", expr):
        assert set(reasons.split("|")) <= REASONS.keys(), reasons


def test_the_panels_fill_the_grid_without_overlap():
    taken = Counter()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        taken.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
    assert max(taken.values()) == 1
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_panel_says_what_it_shows():
    assert [row["title"] for row in ROWS] == [
        "At a glance", "Throughput", "Latency", "Failures", "Leases and staging", "Peers",
    ]  # fmt: skip
    assert DASHBOARD["panels"][0]["type"] == "row"
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["description"].endswith((".", "?")), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        unit = panel["fieldConfig"]["defaults"].get("unit") or panel["options"]["yAxis"]["unit"]
        assert unit, panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert 'job=~"$job", instance=~"$instance"' in target["expr"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_variables_are_declared_before_they_are_used():
    declared = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert declared == ["datasource", "job", "instance"]
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(DASHBOARD["panels"]))) - {"__rate_interval", "__range"}
    assert used <= set(declared)
    for variable in DASHBOARD["templating"]["list"][1:]:
        assert set(re.findall(r"\bkvplan_\w+", variable["query"]["query"])) <= EXPORTED.keys()


def test_the_declared_numbers_that_matter_are_on_the_dashboard():
    shown = set(re.findall(r"\bkvplan_\w+?(?=_bucket|_sum|_count|\b)", json.dumps(PANELS)))
    assert shown >= {
        "kvplan_received_bytes_total", "kvplan_read_seconds", "kvplan_handshake_seconds", "kvplan_claim_seconds",
        "kvplan_transfer_seconds", "kvplan_scatter_seconds", "kvplan_failures_total", "kvplan_refusals_total",
        "kvplan_expiries_total", "kvplan_live_offers", "kvplan_peer_received_bytes_total", "kvplan_bytes_in_flight",
        "kvplan_staging_slots_used", "kvplan_pieces_retried_total", "kvplan_stale_references_total",
    }  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_rule_tells_whom_it_wakes_and_what_to_do(rule):
    assert rule["alert"].startswith("KVPlan")
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 40
    labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    kept = {word.strip() for words in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for word in words.split(",")}
    assert labels <= kept
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor in anchors(ROOT / page), rule["annotations"]["runbook"]


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_reason_that_is_not_routine_wakes_somebody():
    named = {
        word
        for rule in RULES
        for words in re.findall(r"reason=~?\"([^\"]*)\"", rule["expr"])
        for word in words.split("|")
    }
    routine = {"aborted", "closing", "withdrawn"}
    by_their_own_number = {"digest_mismatch", "expired", "overloaded"}
    unknown_here = {"engine_restarted", "refused"}
    assert named | routine | by_their_own_number | unknown_here == set(REASONS)
