"""Faults between engines in processes of their own, over NIXL, that end engines: killed, restarted, shut down, frozen.

Several engines are started, and die, beside each other: as many deaths as a fault is to be played, in rounds.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import pytest

from tests.session.engines import D_SHAPE, ONE_D, ONE_P, P_SHAPE, QUICK
from tests.session.faults import FAULTS, bounded, check_well, one_request, reasons, until
from tests.session.processes import EngineProcess

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

TOKENS = 12
AT_ONCE = 5
ROUNDS = [20 // AT_ONCE, pytest.param(100 // AT_ONCE, marks=pytest.mark.long)]
PIECEMEAL = replace(QUICK, max_post_bytes=64, max_posted=4, staging_bytes=0)
"""Reads of many small pieces, few of them at a time: who dies in their midst dies in the middle of a read."""


@pytest.fixture(params=ROUNDS, ids=lambda rounds: f"{rounds * AT_ONCE}-times")
def rounds(request):
    return request.param


@contextlib.contextmanager
def started(*engines):
    """Wait for engines that start beside each other; end them with the block."""
    try:
        for engine in engines:
            engine.port = engine.answer()
        yield engines
    finally:
        for engine in engines:
            engine.close()


def some(name, shape, *, ports=(0,) * AT_ONCE, **options):
    """As many engines as die at once, not waited for."""
    return started(*(EngineProcess(f"{name}-{i}", shape, port=port, ready=False, **options)
                     for i, port in enumerate(ports)))  # fmt: skip


def piece(engine, i, num_tokens=TOKENS):
    """Blocks of the i-th of several requests."""
    count = num_tokens // engine.block_size
    return engine.table(num_tokens, first_block=1 + i * count)


def test_f6_f7_producers_killed_in_the_middle_of_reads_and_restarted_on_their_addresses(rounds):
    ports, old = (0,) * AT_ONCE, []
    decode = EngineProcess("decode-0", D_SHAPE, config=PIECEMEAL)
    try:
        for turn in range(rounds):
            with some(f"prefill-{turn}", P_SHAPE, ports=ports, config=PIECEMEAL) as prefills:
                ports = [prefill.port for prefill in prefills]
                with bounded("F7", decode, times=AT_ONCE):
                    for i, prefill in enumerate(prefills):
                        one_request(prefill, decode, f"good-{turn}-{i}", num_tokens=TOKENS)
                    for i, remote in enumerate(old):
                        decode.call("read", f"old-{turn}-{i}", remote, piece(decode, i))
                        assert reasons(decode, f"old-{turn}-{i}") <= {"engine_restarted", "peer_gone"}
                decode.call("wipe")
                decode.call("fail", hold=True)
                old = []
                for i, prefill in enumerate(prefills):
                    old.append(prefill.call("offer", f"r{turn}-{i}", prefill.table(TOKENS), TOKENS))
                    decode.call("read", f"local-{turn}-{i}", old[-1], piece(decode, i))
                    until(lambda: decode.call("total", "transfers_in_flight") >= 3)
                with bounded("F6", decode):
                    for prefill in prefills:
                        prefill.kill()
                    decode.call("fail")
                    for i in range(AT_ONCE):
                        found = reasons(decode, f"local-{turn}-{i}")
                        assert found <= {"received", "peer_gone", "transport_error"}
                        assert found != {"received"} or decode.call("holds", piece(decode, i), TOKENS)
        ledger, _, _ = decode.call("ledger")
        assert ledger["peer_gone"] + ledger.get("transport_error", 0) >= rounds * AT_ONCE
    finally:
        decode.close()


def test_f8_consumers_killed_while_they_hold_claims(rounds):
    with started(EngineProcess("prefill-0", P_SHAPE, ready=False)) as (prefill,):
        for turn in range(rounds):
            with some(f"decode-{turn}", ONE_D) as decodes:
                for i, decode in enumerate(decodes):
                    one_request(prefill, decode, f"good-{turn}-{i}", num_tokens=TOKENS)
                granted = prefill.call("total", "claims_granted")
                for i, decode in enumerate(decodes):
                    remote = prefill.call("offer", f"r{turn}-{i}", prefill.table(TOKENS), TOKENS, lease_s=1.0)
                    decode.call("fail", hold=True)
                    decode.call("read", "local", remote, decode.table(TOKENS))
                until(lambda n=granted: prefill.call("total", "claims_granted") == n + 2 * AT_ONCE)
                with bounded("F8", prefill):
                    for decode in decodes:
                        decode.kill()
                    for i in range(AT_ONCE):
                        prefill.wait("sent", f"r{turn}-{i}", bound_s=FAULTS["F8"].bound_s)
        assert prefill.call("total", "expiries") == 2 * AT_ONCE * rounds


def test_f15_consumers_that_shut_down_with_reads_outstanding(rounds):
    """In every other round the writes end meanwhile; in the others they do not, and nothing is reported."""
    straight = replace(QUICK, staging_bytes=0, close_timeout_s=0.5)
    with started(EngineProcess("prefill-0", P_SHAPE, ready=False)) as (prefill,):
        for turn in range(rounds):
            ends = turn % 2 == 0
            with some(f"decode-{turn}", ONE_D, config=straight) as decodes:
                for i, decode in enumerate(decodes):
                    remote = prefill.call("offer", f"r{turn}-{i}", prefill.table(TOKENS), TOKENS, lease_s=1.0)
                    decode.call("fail", hold=True)
                    decode.call("read", "local", remote, decode.table(TOKENS))
                    until(lambda d=decode: d.call("total", "transfers_in_flight") == 2)
                with bounded("F15", prefill):
                    for decode in decodes:
                        decode.begin("close_in_midst", let_go=ends)
                    found = [decode.answer() for decode in decodes]
                    for i in range(AT_ONCE):
                        prefill.wait("sent", f"r{turn}-{i}", bound_s=FAULTS["F15"].bound_s)
                assert found == [["closing"] if ends else None] * AT_ONCE
                ended = [decode.stop() for decode in decodes]
                assert ended == [0] * AT_ONCE


def test_f15_producers_that_shut_down_with_reads_outstanding(rounds):
    """A producer waits a bounded time for its readers. Whoever is late, in every other round, must not believe it."""
    straight = replace(QUICK, staging_bytes=0, transfer_timeout_s=30.0)
    with started(EngineProcess("decode-0", ONE_D, config=straight, ready=False)) as (decode,):
        for turn in range(rounds):
            ends = turn % 2 == 0
            closing = replace(QUICK, close_timeout_s=3.0 if ends else 0.3)
            with some(f"prefill-{turn}", ONE_P, config=closing) as prefills:
                decode.call("wipe")
                decode.call("fail", hold=True)
                for i, prefill in enumerate(prefills):
                    source = prefill.table(TOKENS)
                    prefill.call("fill", source)
                    remote = prefill.call("offer", f"r{turn}-{i}", source, TOKENS)
                    decode.call("read", f"local-{turn}-{i}", remote, piece(decode, i))
                    until(lambda p=prefill: p.call("total", "claims_granted") == 1,
                          what=lambda n=f"local-{turn}-{i}": decode.call("details", n))  # fmt: skip
                with bounded("F15", decode):
                    for prefill in prefills:
                        prefill.begin("close")
                    if not ends:
                        for prefill in prefills:
                            prefill.answer()
                        until(lambda: decode.call("total", "quarantined_reads") == AT_ONCE)
                    decode.call("fail")
                    for i in range(AT_ONCE):
                        found = reasons(decode, f"local-{turn}-{i}")
                        assert found <= ({"received"} if ends else {"peer_gone", "transport_error", "lease_lost"})
                        assert not ends or decode.call("holds", piece(decode, i), TOKENS)
                for prefill in prefills if ends else ():
                    prefill.answer()
                assert [prefill.stop() for prefill in prefills] == [0] * AT_ONCE


@pytest.fixture(scope="module")
def engines():
    with started(*(EngineProcess(name, shape, ready=False)
                   for name, shape in (("prefill-0", P_SHAPE), ("decode-0", D_SHAPE)))) as pair:  # fmt: skip
        yield pair
        for engine in pair:
            check_well(engine)


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
    assert reasons(decode, "local-frost") == {"expired"}
    one_request(prefill, decode, "after-frost")


def test_t34_a_frozen_producer_is_waited_for_or_given_up_in_time(engines):
    prefill, decode = engines
    source, destination = prefill.table(TOKENS), decode.table(TOKENS)
    prefill.call("fill", source)
    remote = prefill.call("offer", "ice", source, TOKENS)
    with prefill.frozen():
        started_at = time.monotonic()
        decode.call("read", "local-ice", remote, destination)
        found = reasons(decode, "local-ice", bound_s=QUICK.transfer_timeout_s + 5)
        assert found <= {"claim_unanswered", "peer_gone", "transfer_timeout", "lease_lost"}
        assert time.monotonic() - started_at < QUICK.transfer_timeout_s + 4
    prefill.wait("sent", "ice")
    one_request(prefill, decode, "thaw")
