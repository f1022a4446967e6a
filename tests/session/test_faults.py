"""Faults against running sessions with real sockets: each ends in time, with a reason, and nobody dies of it."""

import contextlib
import os
import socket
import threading
import time
from dataclasses import replace

import pytest

from kvplan.errors import DescriptionError
from kvplan.planner import BlockTable
from kvplan.session import FrontDesk, Offer, ReadRequest, RemoteRef, SessionConfig
from kvplan.transport.base import State
from kvplan.transport.memory import MemoryTransport
from kvplan.wire.addresses import Address, parse_address
from kvplan.wire.codec import encode, version_of
from kvplan.wire.messages import NotReady
from kvplan.wire.side_channel import Dialer, Listener, wait
from tests.session.engines import D_SHAPE, P_SHAPE, QUICK, Engine, pair, wait_until
from tests.session.test_end_to_end import TOKENS, run_one

KEY = "the cluster's shared key"


def garbage():
    """What strangers send: raw noise, and frames of noise, of other versions, and of other protocols."""
    return [b"", b"\0", os.urandom(1 << 20), b"KVPL\x00\x09newer", b"KVPL\x00\x01" + os.urandom(1000), b"KVPL",
            encode(NotReady()), b"\x80\x04\x95pickle", b"KVPL\x00\x00" + os.urandom(50)]  # fmt: skip


def pester(address):
    with socket.create_connection(address) as raw, contextlib.suppress(OSError):
        raw.sendall(os.urandom(1 << 20))
    with Dialer() as dialer:
        for frame in garbage():
            dialer.send(address, frame)
        wait_until(lambda: wait(dialer.sockets, 0.05) or any(e.frame for e in dialer.receive()), what="an answer")


def test_f11_noise_on_every_socket_leaves_both_engines_working():
    with pair() as (prefill, decode):
        for engine in (prefill, decode):
            pester(Address("127.0.0.1", engine.desk.port))
            for session in engine.sessions:
                pester(parse_address(session.hello().control_address))
        run_one(prefill, decode)
        assert prefill.total("malformed_messages") > 0
        assert prefill.total("loop_errors") + decode.total("loop_errors") == 0


def test_f11_a_frame_of_another_version_is_answered_with_ours():
    with pair() as (prefill, _):
        for address in (
            Address("127.0.0.1", prefill.desk.port),
            parse_address(prefill.sessions[0].hello().control_address),
        ):
            with Dialer() as dialer:
                dialer.send(address, b"KVPL\x00\x09whatever")
                answer = wait_until(
                    lambda d=dialer: wait(d.sockets, 0.05) or next((e.frame for e in d.receive() if e.frame), None)
                )
                assert version_of(answer) == 0


def test_a_front_desk_of_another_version_fails_the_read_naming_both_versions():
    stop = threading.Event()
    with Listener(host="127.0.0.1") as listener:

        def answer():
            while not stop.is_set():
                wait([listener.socket], 0.05)
                for letter in listener.receive():
                    listener.send(letter.route, b"KVPL\x00\x07a hello of the future")

        future = threading.Thread(target=answer)
        future.start()
        decode = Engine("decode-0", D_SHAPE).start()
        try:
            remote = RemoteRef("future-0", "127.0.0.1", listener.port, "r", "g", decode.table(TOKENS), TOKENS)
            decode.read("local", remote, decode.table(TOKENS))
            assert wait_until(lambda: decode.failures("local")) == ["incompatible"] * 3
            assert "peer speaks protocol version 7, this side speaks 1" in decode.details("local")[0]
        finally:
            stop.set()
            future.join()
            decode.close()


def test_t48_a_mismatch_fails_the_read_with_field_and_both_values_and_both_engines_live():
    with pair(d_options={"compatibility": {"model": "tiny", "dtype": "float32"}}) as (prefill, decode):
        remote = prefill.offer("r", prefill.table(TOKENS), TOKENS)
        decode.read("local", remote, decode.table(TOKENS))
        assert wait_until(lambda: decode.failures("local")) == ["incompatible"] * 3
        assert "dtype: ours float32, theirs bfloat16" in decode.details("local")[0]
        third = Engine("decode-1", D_SHAPE).start()
        try:
            run_one(prefill, third, "other")
        finally:
            third.close()


def test_f12_engines_with_one_key_work_and_a_stranger_gets_nowhere():
    config = replace(QUICK, side_channel_key=KEY)
    stranger_config = replace(QUICK, side_channel_key="another cluster's key", handshake_timeout_s=0.8)
    with pair(p_options={"config": config}, d_options={"config": config}) as (prefill, decode):
        run_one(prefill, decode)
        stranger = Engine("stranger", D_SHAPE, config=stranger_config).start()
        try:
            remote = prefill.offer("r2", prefill.table(TOKENS), TOKENS)
            stranger.read("local", remote, stranger.table(TOKENS))
            assert wait_until(lambda: stranger.failures("local")) == ["handshake_timeout"] * 3
            assert "keys differ" in stranger.details("local")[0]
        finally:
            stranger.close()
        decode.wipe()
        run_one(prefill, decode, "r3")


def test_a_session_on_a_public_address_needs_a_key():
    with pytest.raises(DescriptionError, match="KVPLAN_SIDE_CHANNEL_KEY"):
        FrontDesk(host="0.0.0.0", port=0, config=SessionConfig())


def test_the_key_comes_from_the_environment_unless_it_is_given():
    environ = {"KVPLAN_SIDE_CHANNEL_KEY": KEY}
    assert SessionConfig().with_environment(environ).side_channel_key == KEY
    given = SessionConfig(side_channel_key="x" * 16)
    assert given.with_environment(environ) == given
    assert KEY not in repr(SessionConfig(side_channel_key=KEY))


def test_reads_wait_for_an_engine_that_is_not_published_yet():
    prefill = Engine("prefill-0", P_SHAPE).start(publish=False)
    decode = Engine("decode-0", D_SHAPE).start()
    try:
        source, destination = prefill.table(TOKENS), decode.table(TOKENS)
        prefill.fill(source)
        decode.read("local", prefill.offer("r", source, TOKENS), destination)
        time.sleep(0.3)
        decode.collect()
        assert decode.failures("local") is None
        prefill.publish()
        wait_until(lambda: decode.received("local"))
        decode.check(destination, TOKENS)
    finally:
        decode.close()
        prefill.close()


def test_an_engine_that_is_never_published_fails_the_read_in_time():
    prefill = Engine("prefill-0", P_SHAPE).start(publish=False)
    decode = Engine("decode-0", D_SHAPE).start()
    try:
        started = time.monotonic()
        decode.read("local", prefill.offer("r", prefill.table(TOKENS), TOKENS), decode.table(TOKENS))
        assert wait_until(lambda: decode.failures("local")) == ["handshake_timeout"] * 3
        assert time.monotonic() - started < QUICK.handshake_timeout_s + 1
        assert "not ready" in decode.details("local")[0]
    finally:
        decode.close()
        prefill.close()


def test_t38_an_offer_that_nobody_fetches_is_freed_with_its_lease_without_any_new_work():
    with pair() as (prefill, _):
        prefill.offer("r", prefill.table(TOKENS), TOKENS, lease_s=0.3)
        started = time.monotonic()
        wait_until(lambda: prefill.sent("r"))
        assert 0.25 < time.monotonic() - started < 2
        assert prefill.total("expiries") == 2


def test_f1_an_unknown_request_fails_in_time():
    with pair() as (prefill, decode):
        started = time.monotonic()
        decode.read("local", prefill.reference("never", prefill.table(TOKENS), TOKENS), decode.table(TOKENS))
        assert wait_until(lambda: decode.failures("local")) == ["unknown"] * 3
        assert time.monotonic() - started < QUICK.claim_park_s + 2
        assert prefill.total("stale_references") > 0
        assert decode.sessions[0].stats()["failures.unknown"] == 1


def test_f7_an_engine_that_restarts_on_the_same_address_serves_the_next_request():
    decode = Engine("decode-0", D_SHAPE).start()
    prefill = Engine("prefill-0", P_SHAPE).start()
    try:
        run_one(prefill, decode)
        port = prefill.desk.port
        old = prefill.reference("r9", prefill.table(TOKENS), TOKENS)
        prefill.close()
        prefill = Engine("prefill-1", P_SHAPE, port=port).start()
        decode.wipe()
        run_one(prefill, decode, "again")
        decode.read("stale", old, decode.table(TOKENS))
        assert set(wait_until(lambda: decode.failures("stale"))) <= {"engine_restarted", "peer_gone"}
        assert decode.total("loop_errors") == 0
    finally:
        decode.close()
        prefill.close()


def test_f14_full_queues_refuse_and_never_block_or_raise():
    config = replace(QUICK, max_queue=5)
    engine = Engine("e", P_SHAPE, config=config)
    try:
        session = engine.sessions[0]
        remote = RemoteRef("p", "127.0.0.1", 1, "r", "g", (BlockTable(0, (1,)),), 4)
        started = time.monotonic()
        for i in range(1000):
            session.read(ReadRequest(f"r{i}", remote, (BlockTable(0, (1,)),)))
            session.offer(Offer(f"o{i}", "g", (), 4))
            session.withdraw("o")
            session.cancel("r")
            session.release(remote)
            session.renew([remote])
        assert time.monotonic() - started < 2
        results = session.take_results()
        assert {failure.reason for failure in results.failed.values()} == {"overloaded"}
        assert len(results.failed) >= 994
        assert len(results.sent) >= 995
        assert session.stats()["overloads"] > 1000
    finally:
        engine.close()


def held_transport():
    return MemoryTransport(on_post=lambda batch: State.PENDING)


@pytest.mark.parametrize("ends", [True, False], ids=["which ends in time", "which does not end"])
def test_t47_f15_shutdown_with_a_read_outstanding_waits_a_bounded_time(ends):
    config = replace(QUICK, staging_bytes=0)
    with pair(d_options={"make_transport": held_transport, "config": config}) as (prefill, decode):
        source = prefill.table(TOKENS)
        decode.read("local", prefill.offer("r", source, TOKENS), decode.table(TOKENS))
        wait_until(lambda: all(t.pending() for t in decode.transports))
        closer = threading.Thread(target=decode.sessions[0].close, args=(0.8,))
        started = time.monotonic()
        closer.start()
        time.sleep(0.2)
        assert closer.is_alive()
        assert decode.transports[0].pending()
        late = ReadRequest("late", prefill.reference("r", source, TOKENS), decode.table(TOKENS))
        decode.sessions[0].read(late)
        if ends:
            for handle in decode.transports[0].pending():
                decode.transports[0].complete(handle)
        closer.join()
        assert time.monotonic() - started < (0.8 if ends else 2.0)
        failed = decode.sessions[0].take_results().failed
        assert failed["late"].reason == "closing"
        assert ("local" in failed) == ends
        for transport in decode.transports[1:]:
            for handle in transport.pending():
                transport.complete(handle)


def test_f15_a_producer_that_shuts_down_waits_for_its_reader_and_refuses_others():
    config = replace(QUICK, staging_bytes=0)
    with pair(d_options={"make_transport": held_transport, "config": config}) as (prefill, decode):
        source, destination = prefill.table(TOKENS), decode.table(TOKENS)
        prefill.fill(source)
        decode.read("local", prefill.offer("r", source, TOKENS), destination)
        wait_until(lambda: prefill.total("claims_granted") == 4 and all(t.pending() for t in decode.transports))
        closers = [threading.Thread(target=session.close, args=(5.0,)) for session in prefill.sessions]
        for closer in closers:
            closer.start()
        time.sleep(0.1)
        assert all(closer.is_alive() for closer in closers)
        for transport in decode.transports:
            for handle in transport.pending():
                transport.complete(handle)
        for closer in closers:
            closer.join()
        wait_until(lambda: decode.received("local"))
        decode.check(destination, TOKENS)


def test_closing_twice_and_before_start_is_harmless():
    engine = Engine("e", P_SHAPE)
    engine.close()
    engine.close()
    started = Engine("e", P_SHAPE).start()
    started.close()
    started.close()
    started.sessions[0].cancel("x")
    started.sessions[0].offer(Offer("o", "g", (), 4))
    assert started.sessions[0].take_results().sent == {"o"}


def test_many_requests_at_once_all_arrive():
    with pair() as (prefill, decode):
        source = prefill.table(TOKENS)
        prefill.fill(source)
        names = [f"r{i}" for i in range(60)]
        for name in names:
            decode.read(f"local-{name}", prefill.offer(name, source, TOKENS), decode.table(TOKENS))
        for name in names:
            wait_until(lambda n=name: decode.received(f"local-{n}"))
            wait_until(lambda n=name: prefill.sent(n))
        assert decode.total("handshakes") == 3
        snapshot = decode.sessions[0].stats()
        assert snapshot["read_seconds.count"] == snapshot["read_seconds.le.inf"] == 60


def test_an_idle_pair_of_engines_costs_next_to_nothing():
    with pair() as (prefill, decode):
        run_one(prefill, decode)
        before, started = time.process_time(), time.monotonic()
        time.sleep(1.0)
        share = (time.process_time() - before) / (time.monotonic() - started)
        print(f"idle cost of 5 rank sessions and 2 front desks: {share:.2%} of a core")
        assert share < 0.05
