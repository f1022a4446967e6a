"""Faults on real engines: what is stale, aborted, killed, restarted or pestered ends in time, never in wrong tokens.

One prefill and one decode engine for all of it, in this order; the last two faults end one of them. Decode reads in
small pieces here, so that a read takes about a second and something can happen in its midst.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from kvplan.engines import KVPLAN, complete, completion_body, make_prompt, prefill, prefill_and_decode, read_metrics
from kvplan.engines.engine import wait_all
from kvplan.errors import EngineError
from kvplan.wire.addresses import Address, parse_address
from kvplan.wire.asking import Asker
from kvplan.wire.status import StatusRequest
from tests.engines.pool import NUM_TOKENS, START_TIMEOUT_S, Geometry, forget_prefixes
from tests.session.engines import wait_until
from tests.session.middlemen import pester

pytestmark = [pytest.mark.engines, pytest.mark.nixl, pytest.mark.timeout(400)]

TIMES = {"lease_s": 2.0, "extension_s": 2.0, "heartbeat_s": 0.3, "claim_park_s": 1.0, "hello_timeout_s": 1.0,
         "handshake_timeout_s": 3.0}  # fmt: skip
PIECEMEAL = {"max_post_bytes": 2048, "max_posted": 1, "poll_s": 0.002, "staging_bytes": 0}
GRACE_S = 4.0
"""For an engine's steps, its HTTP server, and a busy machine."""
LEASE_S = TIMES["lease_s"] + TIMES["extension_s"] + GRACE_S
LENGTH = 500


def geometry(block_size, **extra):
    connector = replace(KVPLAN, extra=tuple((TIMES | extra).items()), load_failure_policy="fail")
    return Geometry(block_size=block_size, connector=connector, copy=7)


@pytest.fixture(scope="module")
def engines(pool):
    answers = pool.answers("llama")
    prefill_engine, decode_engine = pool.get(geometry(32), geometry(64, **PIECEMEAL))
    return prefill_engine, decode_engine, answers


@pytest.fixture(params=[1, pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(2400)])],
                ids=lambda turns: f"{turns}-times")  # fmt: skip
def turns(request):
    return range(request.param)


@pytest.fixture(autouse=True)
def nothing_cached(engines):
    _, decode, _ = engines
    revive(decode)
    forget_prefixes(decode)


def revive(engine):
    """Start an engine that a fault has ended, on its old ports."""
    if not engine.alive:
        engine.start()
        wait_all([engine], timeout_s=START_TIMEOUT_S)


def addresses(engine):
    """Everything of an engine that listens on its side channel: its front desk, then its ranks."""
    front = Address(engine.ports.host, engine.ports.side_channel)
    with Asker() as asker:
        cards = asker.ask(front, StatusRequest(), timeout_s=10.0).ranks
    return [front, *(parse_address(card.control_address) for card in cards)]


def rank_value(engine, name):
    """One of the session's numbers, as the rank itself tells it now; metrics are as old as the last engine step."""
    with Asker() as asker:
        found = asker.ask_all(dict.fromkeys(addresses(engine)[1:], StatusRequest()), timeout_s=10.0)
    return sum(status.values[name] for status in found.values())


def used_share(engine):
    """The share of an engine's blocks that requests hold, after one more small request."""
    complete(engine.url, make_prompt(3, seed=1), num_tokens=2)
    return max(value for name, value in read_metrics(engine.url).items() if name.startswith("vllm:kv_cache_usage"))


def check_blocks_come_back(engine, bound_s=LEASE_S):
    wait_until(lambda: not rank_value(engine, "live_offers") and not rank_value(engine, "live_reads"), bound_s,
               f"{engine.options.name}: the end of all leases and reads")  # fmt: skip
    wait_until(lambda: used_share(engine) < 0.01, GRACE_S, f"{engine.options.name}: the return of all blocks")


def check_serves(prefill_engine, decode_engine, answers, length=LENGTH):
    expected = answers[length]
    forget_prefixes(decode_engine)
    answer = prefill_and_decode(prefill_engine.url, decode_engine.url, list(expected.prompt), num_tokens=NUM_TOKENS)
    assert answer.token_ids == expected.token_ids


def check_refused(engine, expected, params, bound_s):
    """A request with these parameters ends in an error, soon; it must not end in tokens."""
    forget_prefixes(engine)
    started = time.monotonic()
    with pytest.raises(EngineError, match="HTTP 500"):
        complete(engine.url, list(expected.prompt), num_tokens=NUM_TOKENS, kv_transfer_params=dict(params))
    assert time.monotonic() - started < bound_s


def leave(engine, prompt, *, after_s, num_tokens, params=None):
    """Send a request and hang up; whether it was over by then does not matter."""
    fields = {"kv_transfer_params": params} if params else {}
    body = completion_body(prompt, num_tokens=num_tokens, **fields)
    with contextlib.suppress(httpx.TimeoutException), httpx.Client(trust_env=False) as client:
        client.post(f"{engine.url}/v1/completions", json=body, timeout=after_s)


def pester_on(listening, stop):
    while not stop.is_set():
        for address in listening:
            pester(address)


def wait_beyond(engine, name, value):
    """Wait until one of the session's numbers has grown."""
    wait_until(lambda: rank_value(engine, name) > value, what=f"{engine.options.name}: more {name} than {value}")


ASKS = {"do_remote_decode": True, "do_remote_prefill": False}


def test_f9_clients_leave_in_prefill_waiting_and_decoding(engines, turns):
    p, d, answers = engines
    for _ in turns:
        aborted = rank_value(d, "failures.aborted")
        for after_s in (0.03, 0.1):
            leave(p, make_prompt(1900, seed=int(after_s * 100)), after_s=after_s, num_tokens=1, params=ASKS)
        for after_s in (0.05, 0.4):  # its second half is still on its way, or all of it
            forget_prefixes(d)
            params = dict(prefill(p.url, list(answers[LENGTH].prompt)))
            leave(d, list(answers[LENGTH].prompt), after_s=after_s, num_tokens=NUM_TOKENS, params=params)
        params = dict(prefill(p.url, list(answers[LENGTH].prompt)))
        leave(d, list(answers[LENGTH].prompt), after_s=4.0, num_tokens=1400, params=params)
        for engine in (p, d):
            check_blocks_come_back(engine)
        assert rank_value(d, "failures.aborted") > aborted
        check_serves(p, d, answers)


def test_f11_noise_on_the_side_channel_of_both_while_they_serve(engines, turns):
    p, d, answers = engines
    for _ in turns:
        listening = [address for engine in (p, d) for address in addresses(engine)]
        stop = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            noise = [pool.submit(pester_on, listening, stop) for _ in range(2)]
            try:
                for length in (100, 300, 500):
                    check_serves(p, d, answers, length)
            finally:
                stop.set()
            for one in noise:
                one.result(30)
        assert rank_value(p, "malformed_messages") > 0
        assert rank_value(p, "loop_errors") == rank_value(d, "loop_errors") == 0
        check_serves(p, d, answers)


def test_f4_f5_references_are_used_after_the_lease_and_after_their_blocks_were_reused(engines, turns):
    p, d, answers = engines
    for _ in turns:
        expected = answers[LENGTH]
        expired, logged = rank_value(d, "failures.expired"), d.log_text().count("reason=expired")
        params = [prefill(p.url, list(expected.prompt)) for _ in range(2)]
        check_blocks_come_back(p)
        check_refused(d, expected, params[0], GRACE_S)
        forget_prefixes(p)
        for seed in range(10):  # more tokens than there are in all blocks
            complete(p.url, make_prompt(1900, seed=seed), num_tokens=1)
        check_refused(d, expected, params[1], GRACE_S)
        assert rank_value(d, "failures.expired") == expired + 2
        assert d.log_text().count("reason=expired") == logged + 2
        check_serves(p, d, answers)


def test_f6_f7_prefill_is_killed_while_decode_reads_and_started_again(engines, turns):
    p, d, answers = engines
    for _ in turns:
        expected = answers[LENGTH]
        forget_prefixes(d)
        stale = prefill(p.url, list(expected.prompt))
        params = dict(prefill(p.url, list(expected.prompt)))
        before = rank_value(d, "transfers")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(
                complete, d.url, list(expected.prompt), num_tokens=NUM_TOKENS, kv_transfer_params=params
            )
            wait_beyond(d, "transfers", before)  # the middle of a read
            killed = time.monotonic()
            p.kill()
            with pytest.raises(EngineError, match="HTTP 500"):
                running.result(30)
        assert time.monotonic() - killed < TIMES["hello_timeout_s"] + GRACE_S
        own = answers[100]
        assert complete(d.url, list(own.prompt), num_tokens=NUM_TOKENS).token_ids == own.token_ids
        check_refused(d, expected, stale, TIMES["handshake_timeout_s"] + GRACE_S)
        check_blocks_come_back(d)

        revive(p)
        check_serves(p, d, answers)
        check_refused(d, answers[300], stale, GRACE_S)
        check_serves(p, d, answers, 300)
        assert rank_value(d, "loop_errors") == 0


def test_f8_decode_is_killed_while_it_holds_claims(engines, turns):
    p, d, answers = engines
    for _ in turns:
        revive(d)
        forget_prefixes(d)
        prompts = [list(answers[length].prompt) for length in (500, 300, 129)]
        params = [dict(prefill(p.url, prompt)) for prompt in prompts]
        claimed, expired = rank_value(p, "claims_granted"), rank_value(p, "expiries")
        with ThreadPoolExecutor(3) as pool:
            running = [
                pool.submit(complete, d.url, prompt, num_tokens=NUM_TOKENS, kv_transfer_params=one)
                for prompt, one in zip(prompts, params, strict=True)
            ]
            wait_beyond(p, "claims_granted", claimed)
            assert rank_value(p, "live_offers") > 0
            d.kill()
            killed = time.monotonic()
            for one in running:
                with pytest.raises(EngineError):
                    one.result(30)
        check_blocks_come_back(p)
        print(f"blocks of a dead decode engine came back after {time.monotonic() - killed:.1f} s")
        assert rank_value(p, "expiries") > expired
        assert complete(p.url, prompts[0], num_tokens=NUM_TOKENS).token_ids == answers[500].token_ids
