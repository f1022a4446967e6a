"""The demo's options, screen and verdict, without engines. What it does with engines is in tests/engines."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvplan.cli import demo, demo_run
from kvplan.cli.app import app
from kvplan.cli.demo_screen import Row, Screen
from kvplan.errors import EngineError

GOOD = Row(100, same=True, num_external_tokens=100, num_bytes=262144, num_descriptors=4, read_s=0.0012, elapsed_s=0.08)


@dataclass(frozen=True)
class Step:
    engine: str
    stage: str
    elapsed_s: float = 1.0
    serving: bool = False


@pytest.fixture
def screen():
    text = io.StringIO()
    return Screen(Console(file=text, width=100)), text


def test_a_row_is_good_when_tokens_are_equal_and_came_from_prefill():
    assert GOOD.good
    assert Row(1, same=True, num_external_tokens=0).good
    assert not Row(100, same=True, num_external_tokens=0).good
    assert not Row(100, same=False, num_external_tokens=100).good
    assert not Row(100, same=True, num_external_tokens=100, failure="HTTP 500").good


def test_the_table_says_what_moved(screen):
    screen, text = screen
    screen.header((1, 2), (32, 64), "kvplan")
    screen.row(GOOD)
    screen.row(Row(33, failure="HTTP 500: [refused]"))
    assert not screen.verdict([GOOD, Row(33, failure="HTTP 500")])
    lines = text.getvalue().splitlines()
    assert "prefill TP 1, blocks of 32 tokens  ->  decode TP 2, blocks of 64 tokens" in text.getvalue()
    assert "  100 tokens     equal    100 tokens     262,144           4    1.2 ms     80 ms" in lines
    assert "FAILED" in text.getvalue()
    assert "    HTTP 500: [refused]" in lines
    assert lines[-1] == "1 of 2 answers are those of a single engine, from cache that was moved."


def test_no_rows_are_no_success(screen):
    assert not screen[0].verdict([])
    assert screen[0].verdict([GOOD])


def test_without_a_terminal_each_change_of_stage_is_one_line(screen):
    screen, text = screen
    with screen.starting():
        for stage in ("importing its libraries", "importing its libraries", "serving"):
            screen.progress(Step("decode", stage))
    assert [line.split("s  ")[1] for line in text.getvalue().splitlines()] == [
        "engine decode: importing its libraries",
        "engine decode: serving",
    ]


def test_on_a_terminal_the_stages_are_drawn_in_place():
    text = io.StringIO()
    screen = Screen(Console(file=text, width=100, force_terminal=True))
    with screen.starting():
        screen.progress(Step("decode", "importing its libraries"))
        screen.progress(Step("decode", "serving", serving=True))
    assert text.getvalue().rstrip().endswith("engine decode: serving")


@pytest.mark.parametrize(
    ("rows", "status"), [([GOOD], 0), ([GOOD, Row(5, same=False)], 1), (EngineError("it died"), 2), (None, 130)]
)
def test_the_exit_status_says_the_truth(monkeypatch, rows, status):
    def run(options, screen):
        if rows is None:
            raise KeyboardInterrupt
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setattr(demo_run, "run", run)
    monkeypatch.setattr(demo, "NEEDED", ())
    assert CliRunner().invoke(app, ["demo"]).exit_code == status


def test_options_reach_the_run(monkeypatch):
    seen = []
    monkeypatch.setattr(demo_run, "run", lambda options, screen: seen.append(options) or [GOOD])
    monkeypatch.setattr(demo, "NEEDED", ())
    CliRunner().invoke(app, ["demo", "--prefill-tp", "2", "--decode-block-size", "96", "--prompts", "3"])
    assert (seen[0].tp, seen[0].block_size, seen[0].num_prompts) == ((2, 2), (32, 96), 3)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(demo, "NEEDED", ("numpy", "no_such_package"))
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert "the demo needs no_such_package" in done.output


@pytest.mark.parametrize("size", ["48", "100"])
def test_block_sizes_that_the_engine_does_not_take_are_refused_before_it_starts(size):
    done = CliRunner().invoke(app, ["demo", "--decode-block-size", size])
    assert done.exit_code == 2
    assert "multiples of 32" in done.output


def test_the_router_needs_a_url():
    done = CliRunner().invoke(app, ["proxy", "--prefill", "localhost:1", "--decode", "http://localhost:2"])
    assert done.exit_code == 2
    assert "is not a URL" in done.output
