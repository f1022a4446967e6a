"""Verification between running engines: every wrong byte is caught and named, no right one is blamed."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import pytest

from tests.session.engines import wait_until
from tests.session.verifying import KINDS, NUM_TOKENS, VERIFY, combinations, world

COMBINATIONS = list(combinations())
SOME = [COMBINATIONS[9 * i + i % 9] for i in range(20)]
"""Every parallel size with every block size; the nine pairs of layouts take turns."""


def ident(knobs):
    return "-".join(f"{k['tp']}x{k['block_size']}{k['kv_layout'][0]}{k['kv_packing'][0]}" for k in knobs)


def caught_and_named(knobs, kinds, seed, transport="memory"):
    """Read right, then wrong in each way, then right again."""
    with world(*knobs, seed=seed, transport=transport) as w:
        ranks = len(w.decode.sessions)
        assert w.read() == ["received"] * ranks
        assert not any(w.wrong(rank) for rank in range(ranks))
        for number, kind in enumerate(kinds):
            rank = (seed + number) % ranks
            what = w.spoil(kind, rank)
            expected = ["digest_mismatch" if i == rank else "received" for i in range(ranks)]
            assert w.read() == expected, what
            w.check_named(rank)
            w.heal()
        assert w.read() == ["received"] * ranks
        assert w.decode.total("digest_mismatches") == len(kinds)
        assert w.decode.total("reads_verified") == w.num_reads * ranks - len(kinds)
        assert w.decode.total("loop_errors") + w.prefill.total("loop_errors") == 0


@pytest.mark.parametrize("index", range(len(SOME)), ids=[ident(knobs) for knobs in SOME])
def test_a_wrong_byte_is_caught_and_named(index):
    caught_and_named(SOME[index], [KINDS[index % 4]], seed=index)


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(COMBINATIONS)), ids=[ident(knobs) for knobs in COMBINATIONS])
def test_every_kind_of_wrong_bytes_is_caught_and_named_in_every_combination(index):
    caught_and_named(COMBINATIONS[index], KINDS, seed=index)


nixl = pytest.param(
    "nixl",
    marks=[pytest.mark.nixl, pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="needs the package nixl-cu12")],
)


@pytest.mark.parametrize("transport", ["cma", nixl])
@pytest.mark.parametrize("index", [7, 16], ids=lambda index: ident(SOME[index]))
def test_wrong_bytes_between_processes_are_caught_and_named(transport, index):
    caught_and_named(SOME[index], KINDS, seed=index, transport=transport)


CLEAN = [SOME[3], SOME[9], SOME[13], SOME[16]]


@pytest.mark.parametrize("knobs", CLEAN, ids=ident)
@pytest.mark.parametrize("times", [25, pytest.param(225, marks=pytest.mark.long)])
def test_no_right_byte_is_blamed(knobs, times):
    with world(*knobs, first_token=1) as w:
        ranks = len(w.decode.sessions)
        for _ in range(times):
            assert w.read() == ["received"] * ranks
        assert not any(w.wrong(rank) for rank in range(ranks))
        assert w.decode.total("reads_verified") == times * ranks
        assert w.decode.total("verify_seconds.count") == times * ranks
        assert w.prefill.total("digests_answered") >= times * ranks


def test_reads_at_the_same_time_are_verified_each():
    with world(*SOME[17]) as w:
        names = [f"same-{i}" for i in range(20)]
        for name in names:
            w.decode.read(name, w.prefill.offer(name, w.source, NUM_TOKENS), w.destination)
        for name in names:
            wait_until(lambda n=name: w.decode.received(n), what="received")
        assert w.decode.total("reads_verified") == len(names) * len(w.decode.sessions)


def test_a_rate_of_nothing_asks_nothing():
    with world(*SOME[5], config=dataclasses.replace(VERIFY, verify_rate=0.0)) as w:
        w.spoil("layer", 0)
        assert w.read() == ["received"] * len(w.decode.sessions)
        assert w.wrong(0)
        for name in ("reads_verified", "digest_mismatches", "verify_seconds.count", "digest_seconds.count"):
            assert w.decode.total(name) == 0
        assert w.prefill.total("digests_answered") == 0


def test_all_ranks_of_an_engine_verify_the_same_requests():
    with world(*SOME[16], config=dataclasses.replace(VERIFY, verify_rate=0.5)) as w:
        counts = set()
        for _ in range(20):
            assert set(w.read()) == {"received"}
            each = [session.stats()["reads_verified"] for session in w.decode.sessions]
            assert len(set(each)) == 1, each
            counts.add(each[0])
        assert 4 <= max(counts) <= 16
