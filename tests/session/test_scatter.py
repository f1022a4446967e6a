"""Staged pieces that other hands scatter: their blocks and slots are held until that is done. Turns of peers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvplan.session.queues import PieceQueues
from kvplan.session.worker import at_once
from kvplan.testing.strategies import Shape
from tests.session.test_consumer import TOKENS, begin
from tests.session.town import Town


@pytest.fixture
def engines():
    town = Town(staging_bytes=1 << 16, staging_slots=1)
    return town, *town.pair(Shape(1, 4, 2, "HND", "split"), Shape(1, 6, 6, "NHD", "split"))


def wait_with_scatter(decode):
    jobs = []
    for rank in decode.ranks:
        rank.scatter = lambda job: jobs.append(job) or True
    return jobs


def test_a_read_is_received_when_its_scatter_is_done(engines):
    town, prefill, decode = engines
    jobs = wait_with_scatter(decode)
    _, _, destination = begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == [None]
    assert not decode.ranks[0].consumer.is_quiet
    jobs.pop()()
    town.settle()
    assert decode.outcome("local-X") == ["received"]
    decode.check(destination, TOKENS)


def test_a_read_that_is_cancelled_while_it_is_scattered_is_reported_afterwards(engines):
    town, prefill, decode = engines
    jobs = wait_with_scatter(decode)
    begin(town, prefill, decode)
    town.settle()
    decode.ranks[0].consumer.cancel("local-X", town.clock())
    town.settle()
    assert decode.outcome("local-X") == [None]
    jobs.pop()()
    town.settle()
    assert decode.outcome("local-X") == ["aborted"]
    assert decode.ranks[0].consumer.is_quiet


def test_a_slot_that_is_scattered_is_not_given_to_another_read(engines):
    town, prefill, decode = engines
    jobs = wait_with_scatter(decode)
    begin(town, prefill, decode, "X")
    _, _, destination = begin(town, prefill, decode, "Y")
    town.settle()
    assert len(jobs) == 1
    assert not decode.ranks[0].consumer._carrier.staging.has_free
    jobs.pop()()
    town.settle()
    assert len(jobs) == 1
    jobs.pop()()
    town.settle()
    assert decode.outcome("local-Y") == ["received"]
    decode.check(destination, TOKENS)


def test_hands_without_room_leave_the_scatter_to_the_reader(engines):
    town, prefill, decode = engines
    for rank in decode.ranks:
        rank.scatter = lambda job: False
    _, _, destination = begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["received"]
    decode.check(destination, TOKENS)


def test_a_scatter_that_fails_fails_its_read_alone(engines):
    town, prefill, decode = engines
    consumer = decode.ranks[0].consumer

    def broken(slot, runs):
        raise MemoryError("no room")

    whole, consumer._carrier.staging.scatter = consumer._carrier.staging.scatter, broken
    begin(town, prefill, decode, "X")
    town.settle()
    assert decode.outcome("local-X") == ["transport_error"]
    consumer._carrier.staging.scatter = whole
    for rank in decode.ranks:
        rank.scatter = at_once
    begin(town, prefill, decode, "Y")
    town.settle()
    assert decode.outcome("local-Y") == ["received"]


def piece(peer, name, *, staged=False):
    return SimpleNamespace(peer=peer, name=name, scatter=object() if staged else None)


def names(queues, *, staged):
    found = []
    while queues.has_any(staged=staged):
        found.append(queues.take(staged=staged).name)
    return found


def test_peers_take_turns():
    queues = PieceQueues()
    for peer, name in (("p", "p1"), ("p", "p2"), ("p", "p3"), ("q", "q1"), ("r", "r1"), ("r", "r2")):
        queues.add(piece(peer, name))
    assert names(queues, staged=True) == ["p1", "q1", "r1", "p2", "r2", "p3"]


def test_staged_pieces_go_first_while_a_slot_is_free_and_hold_up_nobody_else():
    queues = PieceQueues()
    for name, staged in (("a", False), ("b", True), ("c", False), ("d", True)):
        queues.add(piece("p", name, staged=staged))
    assert queues.take(staged=True).name == "b"
    assert names(queues, staged=False) == ["a", "c"]
    assert not queues.has_any(staged=False)
    assert names(queues, staged=True) == ["d"]
