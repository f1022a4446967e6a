"""What every test may use. Options and order only; fixtures live beside the tests that need them."""

from __future__ import annotations

import signal

import pytest

pytest.register_assert_rewrite(*(f"tests.{room}" for room in ("cli", "proxy", "session", "transport", "vllm", "wire")))
"""Asserts of what tests share explain themselves too, and work with ``python -O``."""


def pytest_configure() -> None:
    """A run started in the background ignores Ctrl-C and hands that down; what tests interrupt must hear it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests only on request; tests with engines last, so that a broken planner is seen in seconds."""
    if not config.getoption("--long"):
        skip = pytest.mark.skip(reason="part of `make test-long`")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)
    items.sort(key=lambda item: item.get_closest_marker("engines") is not None)
