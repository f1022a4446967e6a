"""Faults between two engines in processes of their own, over NIXL and CMA: refusals, stale references, aborts, errors.

Nobody dies in here. Each fault is played ``times`` on one pair of engines, 100 times in a long run.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvplan.planner import BlockTable
from tests.session.engines import D_SHAPE, ONE_D, ONE_P, P_SHAPE, QUICK
from tests.session.faults import bounded, check_well, one_request, reasons, until
from tests.session.processes import EngineProcess

pytestmark = pytest.mark.nixl

TOKENS = 24
PAIRS = 4
"""Of ranks that exchange bytes, between 2 and 3."""
AT_ONCE = 20
BAD_IDS = (12, -2, 1 << 20, 1 << 40, (1 << 62) - 1)


@pytest.fixture(params=[20, pytest.param(100, marks=pytest.mark.long)], ids=lambda times: f"{times}-times")
def times(request):
    return request.param


@pytest.fixture(scope="module", params=["nixl", "cma"])
def engines(request):
    prefill = EngineProcess("prefill-0", P_SHAPE, transport=request.param)
    decode = EngineProcess("decode-0", D_SHAPE, transport=request.param)
    yield prefill, decode
    for engine in (prefill, decode):
        check_well(engine)
        engine.close()


@pytest.fixture
def name(request, times):
    """A prefix of request ids that no other test uses."""
    return f"{request.node.originalname}-{request.node.callspec.id}"


def test_requests_arrive_right(engines, times, name):
    for i in range(times):
        one_request(*engines, f"{name}-{i}")


def test_f1_unknown_requests(engines, times, name):
    prefill, decode = engines
    remotes = [prefill.call("reference", f"{name}-{i}", prefill.table(TOKENS), TOKENS) for i in range(times)]
    with bounded("F1", prefill, decode):
        decode.call("read_many", [(f"local-{r.request_id}", r, decode.table(TOKENS)) for r in remotes])
        for remote in remotes:
            assert reasons(decode, f"local-{remote.request_id}") == {"unknown"}


def test_f2_block_ids_out_of_range(engines, times, name):
    prefill, decode = engines
    good = prefill.table(TOKENS)
    for i in range(times):
        ids = [*good[0].block_ids]
        ids[i % len(ids)] = BAD_IDS[i % len(BAD_IDS)]
        with bounded("F2", prefill, decode):
            remote = prefill.call("offer", f"{name}-{i}", good, TOKENS)
            mangled = replace(remote, tables=(BlockTable(0, tuple(ids)),))
            decode.call("read", f"local-{name}-{i}", mangled, decode.table(TOKENS))
            assert reasons(decode, f"local-{name}-{i}") == {"bind_failed"}
            prefill.wait("sent", f"{name}-{i}")


def test_f2_block_ids_of_another_request(engines, times, name):
    prefill, decode = engines
    for i in range(times):
        with bounded("F2", prefill, decode):
            remote = prefill.call("offer", f"{name}-{i}", prefill.table(TOKENS), TOKENS)
            mangled = replace(remote, tables=prefill.table(TOKENS, first_block=2 + i % 4))
            decode.call("read", f"local-{name}-{i}", mangled, decode.table(TOKENS))
            assert reasons(decode, f"local-{name}-{i}") == {"tables_differ"}
            decode.call("release", remote)
            prefill.wait("sent", f"{name}-{i}")


def test_f3_references_used_twice(engines, times, name):
    prefill, decode = engines
    source, destination, other = prefill.table(TOKENS), decode.table(TOKENS), decode.table(TOKENS, first_block=7)
    prefill.call("fill", source)
    for i in range(times):
        decode.call("wipe")
        with bounded("F3", prefill, decode):
            remote = prefill.call("offer", f"{name}-{i}", source, TOKENS)
            first, second = f"first-{name}-{i}", f"second-{name}-{i}"
            decode.call("read_many", [(first, remote, destination), (second, remote, other)])
            assert reasons(decode, first) == {"received"}
            assert reasons(decode, second) <= {"claimed_by_another", "released"}
            assert decode.call("holds", destination, TOKENS)
            prefill.wait("sent", f"{name}-{i}")


def test_f4_blocks_reused_before_the_read(engines, times, name):
    """The producer gives the request up, writes something else into the blocks, then the read comes."""
    prefill, decode = engines
    source = prefill.table(TOKENS)
    for i in range(times):
        prefill.call("fill", source)
        remote = prefill.call("offer", f"{name}-{i}", source, TOKENS)
        prefill.call("withdraw", f"{name}-{i}")
        prefill.wait("sent", f"{name}-{i}")
        prefill.call("scribble", source)
        with bounded("F4", prefill, decode):
            decode.call("read", f"local-{name}-{i}", remote, decode.table(TOKENS))
            assert reasons(decode, f"local-{name}-{i}") == {"withdrawn"}


def test_f4_blocks_reused_during_the_read(engines, times, name):
    """Granted reads are on their way when decode freezes; the leases end, the blocks are reused, and decode goes on."""
    prefill, decode = engines
    for batch in range(times // AT_ONCE):
        names = [f"{name}-{batch}-{i}" for i in range(AT_ONCE)]
        try:
            be_frozen_during_reads(prefill, decode, names)
        finally:
            decode.call("fail")
        one_request(prefill, decode, f"{name}-{batch}-after")


def be_frozen_during_reads(prefill, decode, names):
    source = prefill.table(TOKENS)
    one_request(prefill, decode, f"{names[0]}-before", source=source)
    decode.call("fail", hold=True)
    granted = prefill.call("total", "claims_granted")
    remotes = [prefill.call("offer", one, source, TOKENS, lease_s=1.0) for one in names]
    decode.call("read_many", [(f"local-{r.request_id}", r, decode.table(TOKENS)) for r in remotes])
    until(lambda: prefill.call("total", "claims_granted") == granted + len(names) * PAIRS)
    with bounded("F4", prefill, decode):
        with decode.frozen():
            for one in names:
                prefill.wait("sent", one, bound_s=QUICK.extension_s + 1)
            prefill.call("scribble", source)
        decode.call("fail")
        for one in names:
            assert reasons(decode, f"local-{one}") == {"lease_lost"}


def test_f5_reads_after_the_lease(engines, times, name):
    prefill, decode = engines
    source = prefill.table(TOKENS)
    prefill.call("fill", source)
    remotes = [prefill.call("offer", f"{name}-{i}", source, TOKENS, lease_s=0.1) for i in range(times)]
    for remote in remotes:
        prefill.wait("sent", remote.request_id)
    prefill.call("scribble", source)
    with bounded("F5", prefill, decode):
        decode.call("read_many", [(f"local-{r.request_id}", r, decode.table(TOKENS)) for r in remotes])
        for remote in remotes:
            assert reasons(decode, f"local-{remote.request_id}") == {"expired"}


def test_f9_reads_aborted_at_any_moment(engines, times, name):
    prefill, decode = engines
    source = prefill.table(TOKENS)
    prefill.call("fill", source)
    for i in range(times):
        with bounded("F9", prefill, decode):
            remote = prefill.call("offer", f"{name}-{i}", source, TOKENS)
            decode.call("read", f"local-{name}-{i}", remote, decode.table(TOKENS))
            time.sleep(0.0005 * (i % 20))
            decode.call("cancel", f"local-{name}-{i}")
            assert reasons(decode, f"local-{name}-{i}") <= {"aborted", "received"}
            decode.call("release", remote)
            prefill.wait("sent", f"{name}-{i}", bound_s=5.0)


@pytest.mark.parametrize("transport", ["nixl", "cma"])
def test_f9_reads_aborted_with_writes_outstanding(transport, times):
    """Blocks are not reported while a carrier may write into them; then at once, and the producer's are free too."""
    prefill = EngineProcess("prefill-0", P_SHAPE, transport=transport)
    decode = EngineProcess("decode-0", D_SHAPE, transport=transport, config=replace(QUICK, staging_bytes=0))
    try:
        source = prefill.table(TOKENS)
        prefill.call("fill", source)
        for i in range(times):
            decode.call("fail", hold=True)
            remote = prefill.call("offer", f"r{i}", source, TOKENS)
            decode.call("read", f"local-{i}", remote, decode.table(TOKENS))
            until(lambda: decode.call("total", "transfers_in_flight") == PAIRS)
            decode.call("cancel", f"local-{i}")
            until(lambda: decode.call("total", "quarantined_reads") == 3)
            assert decode.call("failures", f"local-{i}") is None
            with bounded("F9", prefill, decode):
                decode.call("fail")
                assert reasons(decode, f"local-{i}") == {"aborted"}
                prefill.wait("sent", f"r{i}", bound_s=5.0)
        one_request(prefill, decode, "after")
    finally:
        decode.close()
        prefill.close()


def test_f9_reads_aborted_while_their_peer_is_not_known(engines, times, name):
    prefill, decode = engines
    nowhere = replace(prefill.call("reference", name, prefill.table(TOKENS), TOKENS), engine_id="nobody", port=9)
    for i in range(times):
        with bounded("F9", prefill, decode):
            decode.call("read", f"local-{name}-{i}", nowhere, decode.table(TOKENS))
            decode.call("cancel", f"local-{name}-{i}")
            assert reasons(decode, f"local-{name}-{i}") == {"aborted"}


def test_f9_offers_withdrawn_at_any_moment(engines, times, name):
    prefill, decode = engines
    source = prefill.table(TOKENS)
    prefill.call("fill", source)
    for i in range(times):
        with bounded("F9", prefill, decode):
            remote = prefill.call("offer", f"{name}-{i}", source, TOKENS)
            decode.call("read", f"local-{name}-{i}", remote, decode.table(TOKENS))
            time.sleep(0.0005 * (i % 20))
            prefill.call("withdraw", f"{name}-{i}")
            assert reasons(decode, f"local-{name}-{i}") <= {"withdrawn", "received"}
            prefill.wait("sent", f"{name}-{i}", bound_s=5.0)


@pytest.mark.parametrize("where", ["posts", "polls"])
def test_f13_transport_errors_are_made_good_within_the_budget_and_reported_beyond_it(engines, times, name, where):
    prefill, decode = engines
    for i in range(times):
        with bounded("F13", prefill, decode):
            decode.call("fail", **{where: 1})
            one_request(prefill, decode, f"{name}-once-{i}")
    for i in range(times):
        with bounded("F13", prefill, decode):
            decode.call("fail", **{where: 1000})
            remote = prefill.call("offer", f"{name}-{i}", prefill.table(TOKENS), TOKENS)
            decode.call("read", f"local-{name}-{i}", remote, decode.table(TOKENS))
            assert reasons(decode, f"local-{name}-{i}") == {"transport_error"}
            prefill.wait("sent", f"{name}-{i}", bound_s=5.0)
    decode.call("fail")
    one_request(prefill, decode, f"{name}-mended")


@pytest.mark.parametrize("transport", ["nixl", "cma"])
def test_f13_a_transport_that_cannot_let_go_of_a_peer(transport, times):
    """Idle peers are forgotten soon here, so that each request connects anew and each release fails."""
    prefill = EngineProcess("prefill-0", P_SHAPE, transport=transport)
    config = replace(QUICK, peer_idle_s=0.0, heartbeat_s=0.02)
    decode = EngineProcess("decode-0", D_SHAPE, transport=transport, config=config)
    try:
        for i in range(times):
            with bounded("F13", prefill, decode):
                decode.call("fail", disconnects=1)
                one_request(prefill, decode, f"r{i}")
                until(lambda: not decode.call("total", "live_peers"))
        assert decode.call("total", "handshakes") > times
    finally:
        decode.close()
        prefill.close()


FULL = {
    "commands": ({"max_queue": 8}, {}, {"overloaded", "received"}),
    "reads": ({"max_reads": 2}, {}, {"overloaded", "received"}),
    "offers": ({}, {"max_offers": 2}, {"overloaded", "received"}),
    "claims": ({}, {"max_parked": 2}, {"overloaded", "received"}),
    "peers": ({"max_peers": 0}, {}, {"overloaded"}),
    "staging": ({"staging_slots": 1, "staging_bytes": 1 << 14}, {}, {"received"}),
    "posts": ({"max_posted": 1}, {}, {"received"}),
}


@pytest.mark.parametrize("what", FULL)
def test_f14_what_is_full_refuses_or_makes_wait(what, times):
    """So many requests at once are more than there is room for: each ends, and those that succeed are right."""
    of_decode, of_prefill, expected = FULL[what]
    prefill = EngineProcess("prefill-0", ONE_P, config=replace(QUICK, **of_prefill))
    decode = EngineProcess("decode-0", ONE_D, config=replace(QUICK, **of_decode))
    try:
        source, destination = prefill.table(12), decode.table(12)
        prefill.call("fill", source)
        found = set()
        with bounded("F14", prefill, decode, times=5):
            remotes = [prefill.call("reference", f"r{i}", source, 12) for i in range(times)]
            offer = [prefill.call("offer", r.request_id, source, 12) for r in remotes if what != "claims"]
            decode.call("read_many", [(f"local-{r.request_id}", r, destination) for r in remotes])
            if what == "claims":
                until(lambda: prefill.call("total", "refusals.overloaded"))
                offer = [prefill.call("offer", r.request_id, source, 12) for r in remotes]
            for remote in remotes:
                found |= reasons(decode, f"local-{remote.request_id}")
                decode.call("release", remote)
            for remote in offer:
                prefill.call("withdraw", remote.request_id)
                prefill.wait("sent", remote.request_id)
        assert found == expected
        if "received" in found:
            assert decode.call("holds", destination, 12)
        assert decode.call("keeps_out", destination)
    finally:
        decode.close()
        prefill.close()
