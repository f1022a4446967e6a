"""The tables of docs/operations.md say what the code says."""

from __future__ import annotations

from tests.docs.tables import MARKED, PAGE, written_anew


def test_tables_are_those_of_the_code():
    page = PAGE.read_text()
    assert [found[2] for found in MARKED.finditer(page)] == ["settings", "reasons", "metrics"]
    assert page == written_anew(page), "run `make docs`"
