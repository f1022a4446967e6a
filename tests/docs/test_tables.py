"""The tables of docs/operations.md say what the code says."""

from __future__ import annotations

import re

import yaml

from tests.docs.tables import MARKED, NOTES, PAGE, ROOT, written_anew
from tests.session.faults import FAULTS


def test_tables_are_those_of_the_code():
    page = PAGE.read_text()
    assert [found[2] for found in MARKED.finditer(page)] == ["settings", "reasons", "metrics", "unreachable"]
    assert page == written_anew(page), "run `make docs`"


def test_the_table_of_faults_is_that_of_the_tests_and_every_test_is_there():
    page = NOTES.read_text()
    assert [found[2] for found in MARKED.finditer(page)] == ["faults"]
    assert page == written_anew(page), "run `make docs`"
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "session").glob("test_process_*.py"))
    on_engines = (ROOT / "tests" / "engines" / "test_faults.py").read_text()
    for name, fault in FAULTS.items():
        assert f"def {fault.tests}" in tests, name
        assert not fault.on_engines or re.search(rf"def test_(f\d+_)*{name.lower()}_", on_engines), name


def test_messages_at_start_up_are_those_of_the_code():
    table = PAGE.read_text().partition("<!-- messages -->")[2].partition("<!-- end messages -->")[0]
    named = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    source = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    assert len(named) > 15
    assert [message for message in named if message not in source] == []


def test_every_alert_is_explained():
    rules = yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())["groups"][0]["rules"]
    explained = re.findall(r"^\| `(KVPlan\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert explained == [rule["alert"] for rule in rules]
