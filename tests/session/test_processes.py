"""Faults between real processes over NIXL (and CMA): killed, frozen, restarted, stale, reused. All bounded.

Each fault is repeated ``TIMES`` on one pair of engines where nobody dies; where somebody does, it is started anew.
"""

import contextlib
import socket
import time
from dataclasses import replace

import pytest

from tests.session.engines import D_SHAPE, P_SHAPE, QUICK
from tests.session.processes import EngineProcess
from tests.session.test_faults import pester

pytestmark = pytest.mark.nixl

TOKENS = 24
TIMES = 20


@pytest.fixture(scope="module", params=["nixl", "cma"])
def engines(request):
    prefill = EngineProcess("prefill-0", P_SHAPE, transport=request.param)
    decode = EngineProcess("decode-0", D_SHAPE, transport=request.param)
    yield prefill, decode
    for engine in (prefill, decode):
        health = engine.call("health")
        assert (health["threads"], health["loop_errors"], health["live_reads"], health["quarantined"]) == (
            2 * (2 if engine is prefill else 3), 0, 0, 0,
        )  # fmt: skip
        assert health["live_offers"] == 0
        engine.close()


def one_request(prefill, decode, name, *, source=None, destination=None):
    source, destination = source or prefill.table(TOKENS), destination or decode.table(TOKENS, first_block=2)
    prefill.call("fill", source)
    decode.call("wipe")
    remote = prefill.call("offer", name, source, TOKENS)
    decode.call("read", f"local-{name}", remote, destination)
    decode.wait("received", f"local-{name}")
    decode.call("check", destination, TOKENS)
    prefill.wait("sent", name)


def test_requests_arrive_right(engines):
    prefill, decode = engines
    for i in range(TIMES):
        one_request(prefill, decode, f"plain-{i}")


def test_f1_unknown_requests(engines):
    prefill, decode = engines
    remotes = [prefill.call("reference", f"never-{i}", prefill.table(TOKENS), TOKENS) for i in range(TIMES)]
    started = time.monotonic()
    decode.call("read_many", [(f"local-{r.request_id}", r, decode.table(TOKENS)) for r in remotes])
    for remote in remotes:
        assert decode.wait("failures", f"local-{remote.request_id}") == ["unknown"] * 3
    assert time.monotonic() - started < QUICK.claim_park_s + 5


def test_f2_block_ids_out_of_range(engines):
    prefill, decode = engines
    for i in range(TIMES):
        tables = prefill.table(TOKENS, first_block=8)
        remote = prefill.call("offer", f"range-{i}", tables, TOKENS)
        decode.call("read", f"local-range-{i}", remote, decode.table(TOKENS))
        assert decode.wait("failures", f"local-range-{i}") == ["bind_failed"] * 3
        prefill.wait("sent", f"range-{i}")


def test_f3_references_used_twice(engines):
    prefill, decode = engines
    source = prefill.table(TOKENS)
    prefill.call("fill", source)
    for i in range(TIMES):
        remote = prefill.call("offer", f"twice-{i}", source, TOKENS)
        decode.call("read_many", [(f"{turn}-{i}", remote, decode.table(TOKENS)) for turn in ("first", "second")])
        assert decode.wait("failures", f"first-{i}") == ["received"] * 3
        assert set(decode.wait("failures", f"second-{i}")) <= {"claimed_by_another", "released"}
        prefill.wait("sent", f"twice-{i}")


def test_f4_f5_references_that_are_stale_because_the_blocks_were_reused(engines):
    """The lease ends, the producer writes something else into the blocks, then the read comes."""
    prefill, decode = engines
    source = prefill.table(TOKENS)
    remotes = [prefill.call("offer", f"stale-{i}", source, TOKENS, lease_s=0.1) for i in range(TIMES)]
    for remote in remotes:
        prefill.wait("sent", remote.request_id)
    prefill.call("scribble", source)
    for i, remote in enumerate(remotes):
        decode.call("read", f"local-stale-{i}", remote, decode.table(TOKENS))
        assert decode.wait("failures", f"local-stale-{i}") == ["expired"] * 3


def test_f9_reads_cancelled_at_any_moment(engines):
    prefill, decode = engines
    source = prefill.table(TOKENS)
    prefill.call("fill", source)
    for i in range(TIMES):
        remote = prefill.call("offer", f"cancel-{i}", source, TOKENS)
        decode.call("read", f"local-cancel-{i}", remote, decode.table(TOKENS))
        time.sleep(0.0005 * i)
        decode.call("cancel", f"local-cancel-{i}")
        assert set(decode.wait("failures", f"local-cancel-{i}")) <= {"aborted", "received"}
        decode.call("release", remote)
        prefill.wait("sent", f"cancel-{i}", bound_s=5.0)


def test_f9_offers_withdrawn_at_any_moment(engines):
    prefill, decode = engines
    source = prefill.table(TOKENS)
    prefill.call("fill", source)
    for i in range(TIMES):
        remote = prefill.call("offer", f"withdraw-{i}", source, TOKENS)
        decode.call("read", f"local-withdraw-{i}", remote, decode.table(TOKENS))
        time.sleep(0.0005 * i)
        prefill.call("withdraw", f"withdraw-{i}")
        assert set(decode.wait("failures", f"local-withdraw-{i}")) <= {"withdrawn", "received"}
        prefill.wait("sent", f"withdraw-{i}", bound_s=5.0)


@pytest.mark.parametrize("where", ["posts", "polls"])
def test_f13_transport_errors_are_made_good_within_the_budget_and_reported_beyond_it(engines, where):
    prefill, decode = engines
    for i in range(TIMES):
        decode.call("fail", **{where: 1})
        one_request(prefill, decode, f"flaky-{where}-{i}")
    for i in range(TIMES):
        decode.call("fail", **{where: 1000})
        remote = prefill.call("offer", f"broken-{where}-{i}", prefill.table(TOKENS), TOKENS)
        decode.call("read", f"local-broken-{where}-{i}", remote, decode.table(TOKENS))
        assert decode.wait("failures", f"local-broken-{where}-{i}") == ["transport_error"] * 3
        prefill.wait("sent", f"broken-{where}-{i}", bound_s=5.0)
    decode.call("fail")
    one_request(prefill, decode, f"mended-{where}")


def test_f11_noise_and_a_thousand_connections_on_every_socket(engines):
    prefill, decode = engines
    for engine in (prefill, decode):
        for address in engine.call("addresses"):
            for _ in range(TIMES // 4):
                pester(address)
    with contextlib.ExitStack() as stack:
        for address in prefill.call("addresses") * 300:
            stack.enter_context(socket.create_connection(address))
        one_request(prefill, decode, "among-strangers")
    one_request(prefill, decode, "after-strangers")


def test_a_frozen_consumer_does_not_keep_blocks_and_does_not_believe_what_it_finds(engines):
    prefill, decode = engines
    source = prefill.table(TOKENS)
    prefill.call("fill", source)
    one_request(prefill, decode, "before-frost")
    remote = prefill.call("offer", "frost", source, TOKENS, lease_s=0.3)
    with decode.frozen():
        prefill.wait("sent", "frost", bound_s=QUICK.extension_s + 3)
        prefill.call("scribble", source)
    decode.call("read", "local-frost", remote, decode.table(TOKENS))
    assert decode.wait("failures", "local-frost") == ["expired"] * 3
    one_request(prefill, decode, "after-frost")


def test_t34_a_frozen_producer_is_waited_for_or_given_up_in_time(engines):
    prefill, decode = engines
    source, destination = prefill.table(TOKENS), decode.table(TOKENS)
    prefill.call("fill", source)
    remote = prefill.call("offer", "ice", source, TOKENS)
    with prefill.frozen():
        started = time.monotonic()
        decode.call("read", "local-ice", remote, destination)
        reasons = decode.wait("failures", "local-ice", bound_s=QUICK.transfer_timeout_s + 5)
        assert set(reasons) <= {"claim_unanswered", "peer_gone", "transfer_timeout", "lease_lost"}
        assert time.monotonic() - started < QUICK.transfer_timeout_s + 4
    prefill.wait("sent", "ice")
    one_request(prefill, decode, "thaw")


@pytest.mark.parametrize("transport", ["nixl", "cma"])
def test_f6_f7_a_producer_killed_in_the_middle_and_restarted_on_the_same_address(transport):
    piecemeal = replace(QUICK, max_post_bytes=64, staging_bytes=0)
    decode = EngineProcess("decode-0", D_SHAPE, transport=transport, config=piecemeal)
    port = 0
    try:
        for turn in range(3):
            prefill = EngineProcess(f"prefill-{turn}", P_SHAPE, transport=transport, port=port)
            port = prefill.port
            try:
                one_request(prefill, decode, f"good-{turn}")
                source = prefill.table(TOKENS)
                remotes = [prefill.call("offer", f"r{turn}-{i}", source, TOKENS) for i in range(10)]
                started = time.monotonic()
                decode.call("read_many", [(f"local-{r.request_id}", r, decode.table(TOKENS)) for r in remotes])
                prefill.kill()
                for remote in remotes:
                    reasons = set(decode.wait("failures", f"local-{remote.request_id}"))
                    assert reasons <= {"received", "peer_gone", "transport_error", "claim_unanswered"}
                assert time.monotonic() - started < QUICK.transfer_timeout_s + 3
                decode.call("read", f"late-{turn}", remotes[0], decode.table(TOKENS))
                assert set(decode.wait("failures", f"late-{turn}")) <= {
                    "peer_gone",
                    "handshake_timeout",
                    "transport_error",
                }
            finally:
                prefill.close()
        health = decode.call("health")
        assert (health["threads"], health["loop_errors"], health["live_reads"]) == (6, 0, 0)
    finally:
        decode.close()


def test_f8_a_consumer_killed_while_it_holds_claims():
    prefill = EngineProcess("prefill-0", P_SHAPE)
    try:
        for turn in range(2):
            decode = EngineProcess(f"decode-{turn}", D_SHAPE)
            try:
                one_request(prefill, decode, f"good-{turn}")
                remote = prefill.call("offer", f"r{turn}", prefill.table(TOKENS), TOKENS, lease_s=1.0)
                decode.call("renew", [remote])
                time.sleep(0.3)
                decode.call("read", "local", remote, decode.table(TOKENS))
                decode.kill()
                started = time.monotonic()
                prefill.wait("sent", f"r{turn}", bound_s=QUICK.extension_s + 1)
                print(f"blocks of a dead reader came back after {time.monotonic() - started:.2f} s")
            finally:
                decode.close()
        health = prefill.call("health")
        assert (health["threads"], health["loop_errors"], health["live_offers"]) == (4, 0, 0)
    finally:
        prefill.close()
