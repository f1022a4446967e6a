"""With ``python -O`` too the tests test: their asserts, those of what they share, and what is shipped for them."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan.planner import BlockTable
from kvplan.session import Failure, Results
from kvplan.testing.oracle import check_moved, write_coordinates
from tests.session.engines import P_SHAPE, Engine
from tests.session.processes import EngineProcess
from tests.session.town import Town


def test_an_assert_of_a_test_fails():
    one = 1
    with pytest.raises(AssertionError):
        assert one == 2


def test_an_assert_of_what_tests_share_fails():
    town = Town()
    prefill, _ = town.pair()
    prefill.ranks[0].results["failed"]["r"] = None
    rank = prefill.ranks[0]
    rank.consumer.take_results = lambda: Results(failed={"r": Failure("aborted")})
    with pytest.raises(AssertionError, match="failed twice"):
        rank.collect()


def test_the_oracle_sees_one_wrong_byte():
    engine = Engine("e", P_SHAPE)
    try:
        tables = (BlockTable(0, (1, 2)),)
        memory = engine.memories[0]
        write_coordinates(memory, tables)
        check_moved(memory, tables, lambda token: True)
        held = memory.bytes[0]
        held[np.flatnonzero(held != held[0])[0]] ^= 1
        with pytest.raises(AssertionError, match="wrong"):
            check_moved(memory, tables, lambda token: True)
    finally:
        engine.close()


def test_processes_of_tests_run_like_the_test_and_see_wrong_bytes():
    engine = EngineProcess("e", P_SHAPE, transport="cma")
    try:
        with pytest.raises(AssertionError, match="wrong"):
            engine.call("check", engine.table(4), 4)
        assert engine.call("health")["debug"] is __debug__
    finally:
        engine.close()
