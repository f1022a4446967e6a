"""Faults of what comes over the side channel, to engines in processes of their own: lost, repeated, forged, false."""

from __future__ import annotations

import contextlib
import json
import select
import time
from dataclasses import replace

import msgspec
import pytest
import zmq

from kvplan.wire.addresses import Address
from kvplan.wire.codec import decode as decoded
from kvplan.wire.codec import encode
from kvplan.wire.messages import HelloRequest, Introduce, Party
from kvplan.wire.side_channel import Dialer, Listener, wait
from tests.session.engines import D_SHAPE, ONE_D, P_SHAPE, QUICK
from tests.session.faults import bounded, check_well, one_request, reasons, until
from tests.session.lies import LIES
from tests.session.middlemen import HOST, Middleman, Wiretap, connect, pester
from tests.session.processes import EngineProcess

pytestmark = pytest.mark.nixl

TOKENS = 12
KEY = "the cluster's shared key"
PATIENT = replace(QUICK, claim_park_s=3.0, claim_timeout_s=6.0, advertise_host=HOST)
"""Parked messages outlive a slow machine; ranks are reached through a middleman."""


@pytest.fixture(params=[20, pytest.param(100, marks=pytest.mark.long)], ids=lambda times: f"{times}-times")
def times(request):
    return request.param


@contextlib.contextmanager
def pair(*, p_config=QUICK, d_config=QUICK, transport="nixl"):
    prefill = EngineProcess("prefill-0", P_SHAPE, config=p_config, transport=transport)
    decode = EngineProcess("decode-0", D_SHAPE, config=d_config, transport=transport)
    try:
        yield prefill, decode
        for engine in (prefill, decode):
            check_well(engine)
    finally:
        decode.close()
        prefill.close()


@contextlib.contextmanager
def between(prefill, kind=Middleman):
    """Stand between the readers and the ranks of an engine that advertises ``HOST``."""
    men = [kind(Address("127.0.0.1", address.port)) for address in prefill.call("addresses")[1:]]
    try:
        yield men
    finally:
        for man in men:
            man.close()


@pytest.fixture(scope="module")
def observed():
    """Engines whose ranks are reached through middlemen, that pass everything on until they are told otherwise."""
    with pair(p_config=PATIENT) as (prefill, decode), between(prefill) as men:
        one_request(prefill, decode, "first", num_tokens=TOKENS)
        yield prefill, decode, men


@pytest.fixture
def name(request, times):
    return f"{request.node.originalname}-{times}"


def let(men, **copies):
    for man in men:
        man.copies = copies


def test_f10_a_lost_done_is_said_again(observed, times, name):
    prefill, decode, men = observed
    for i in range(times):
        lost = []

        def first_is_lost(lost=lost):
            lost.append(1)
            return len(lost) > 3

        let(men, Done=first_is_lost)
        with bounded("F10", prefill, decode):
            one_request(prefill, decode, f"{name}-{i}", num_tokens=TOKENS)
    let(men)
    assert prefill.call("total", "expiries") == 0


def test_f10_a_done_that_is_lost_for_ever_costs_a_lease(observed, times, name):
    prefill, decode, men = observed
    source = prefill.table(TOKENS)
    prefill.call("fill", source)
    expired = prefill.call("total", "expiries")
    let(men, Done=0, Renew=0)
    remotes = [prefill.call("offer", f"{name}-{i}", source, TOKENS, lease_s=1.0) for i in range(times)]
    with bounded("F10", prefill, decode):
        decode.call("read_many", [(f"local-{r.request_id}", r, decode.table(TOKENS)) for r in remotes])
        for remote in remotes:
            assert reasons(decode, f"local-{remote.request_id}") == {"received"}
            prefill.wait("sent", remote.request_id)
    assert decode.call("holds", decode.table(TOKENS), TOKENS)
    assert prefill.call("total", "expiries") == expired + 2 * times
    let(men)


def test_f10_repeated_messages_say_nothing_new(observed, times, name):
    """Each message arrives three times, in both directions; an offer that ends twice would fail the test."""
    prefill, decode, men = observed
    let(men, Done=3, DoneAck=3, Claim=3, Granted=3, Renew=3, Renewed=3, Release=3, Released=3, Introduce=3)
    before = prefill.call("total", "done_duplicates")
    for i in range(times):
        with bounded("F10", prefill, decode):
            one_request(prefill, decode, f"{name}-{i}", num_tokens=TOKENS)
    assert prefill.call("total", "done_duplicates") >= before + times
    let(men)


def test_f10_a_done_before_its_offer_is_kept_for_it(observed, times, name):
    prefill, decode, _ = observed
    source = prefill.table(TOKENS)
    for i in range(times):
        remote = prefill.call("reference", f"{name}-{i}", source, TOKENS)
        decode.call("read", f"local-{name}-{i}", remote, decode.table(TOKENS))
        until(lambda: prefill.call("total", "parked_messages") >= 4)
        decode.call("cancel", f"local-{name}-{i}")
        assert reasons(decode, f"local-{name}-{i}") == {"aborted"}
        until(lambda: prefill.call("total", "parked_messages") >= 8)
        with bounded("F10", prefill, decode):
            prefill.call("offer", f"{name}-{i}", source, TOKENS)
            prefill.wait("sent", f"{name}-{i}")
    assert prefill.call("total", "parked_messages") == 0


def test_f12_replayed_messages_change_nothing(observed, times, name):
    """Everything that was ever said is said again by somebody else, while an offer of the same request waits."""
    prefill, decode, men = observed
    source, destination = prefill.table(TOKENS), decode.table(TOKENS)
    for man in men:
        man.passed.clear()
    one_request(prefill, decode, name, num_tokens=TOKENS)
    prefill.call("forget", name)
    remote = prefill.call("offer", name, source, TOKENS, generation="g2")
    granted = prefill.call("total", "claims_granted")
    for _ in range(times):
        with bounded("F12", decode):
            for man in men:
                kinds = {kind for kind, _ in man.passed}
                assert {"Claim", "Done"} <= kinds
                with Dialer() as stranger:
                    for _, frame in man.passed:
                        stranger.send(man.to, frame)
                    until(lambda s=stranger: wait(s.sockets, 0.05) or any(event.frame for event in s.receive()))
    assert prefill.call("total", "claims_granted") == granted
    assert prefill.call("total", "live_offers") == 2
    decode.call("wipe")
    decode.call("read", f"again-{name}", remote, destination)
    assert reasons(decode, f"again-{name}") == {"received"}
    decode.call("check", destination, TOKENS)


def keyed(key=KEY, **changes):
    return replace(QUICK, side_channel_key=key, **changes)


def key_file(path, name):
    """Write a key file for engines of this machine, who know each other by one pair; return the key that names it."""
    public, secret = zmq.curve_keypair()
    path = path / f"{name}.json"
    path.write_text(json.dumps({"secret": secret.decode(), "peers": {"127.0.0.1": public.decode()}}))
    return f"@{path}"


def test_f12_engines_with_key_pairs_and_a_stranger_with_another(tmp_path, times):
    ours, theirs = key_file(tmp_path, "ours"), key_file(tmp_path, "theirs")
    with pair(p_config=keyed(ours), d_config=keyed(ours)) as (prefill, decode):
        stranger = EngineProcess("stranger", ONE_D, config=keyed(theirs, handshake_timeout_s=1.0))
        try:
            for i in range(times):
                one_request(prefill, decode, f"r{i}", num_tokens=TOKENS)
            remotes = [prefill.call("offer", f"s{i}", prefill.table(TOKENS), TOKENS) for i in range(times)]
            with bounded("F12", stranger):
                stranger.call("read_many", [(f"local-{r.request_id}", r, stranger.table(TOKENS)) for r in remotes])
                for remote in remotes:
                    assert reasons(stranger, f"local-{remote.request_id}") == {"handshake_timeout"}
            for remote in remotes:
                prefill.call("withdraw", remote.request_id)
        finally:
            stranger.close()


def test_f12_strangers_are_never_heard_and_recorded_bytes_are_worth_nothing(times):
    with pair(p_config=keyed(advertise_host=HOST), d_config=keyed()) as (prefill, decode), \
            between(prefill, Wiretap) as taps:  # fmt: skip
        one_request(prefill, decode, "first", num_tokens=TOKENS)
        front = Address("127.0.0.1", prefill.port)
        for key in ("", "another cluster's key"):
            with bounded("F12", prefill, decode), contextlib.ExitStack() as stack:
                strangers = [stack.enter_context(Dialer(key=key)) for _ in range(times)]
                for stranger in strangers:
                    for address in (front, *(tap.to for tap in taps)):
                        stranger.send(address, encode(HelloRequest(engine_id="stranger")))
                one_request(prefill, decode, f"beside-{key[:1]}", num_tokens=TOKENS)
                events = [event for stranger in strangers for event in stranger.receive()]
                assert not any(event.frame or event.is_up for event in events)
        heard = [bytes(one) for tap in taps for one in tap.heard]
        assert sum(map(len, heard)) > 1000
        before = [prefill.call("total", count) for count in ("claims_granted", "offers_ended", "unexpected_messages")]
        for _ in range(times):
            with bounded("F12", prefill, decode):
                for tap in taps:
                    for recorded in heard:
                        with connect(tap.to) as raw, contextlib.suppress(OSError):
                            raw.sendall(recorded)
                            select.select([raw], [], [], 0.02)
        after = [prefill.call("total", count) for count in ("claims_granted", "offers_ended", "unexpected_messages")]
        assert after == before
        one_request(prefill, decode, "last", num_tokens=TOKENS)


@pytest.mark.parametrize("key", ["", "another cluster's key"], ids=["no-key", "other-key"])
def test_f12_an_engine_of_another_cluster_is_told_nothing(key, times):
    config = keyed(key, handshake_timeout_s=1.0)
    with pair(p_config=keyed(), d_config=config) as (prefill, stranger):
        source = prefill.table(TOKENS)
        prefill.call("fill", source)
        remotes = [prefill.call("offer", f"r{i}", source, TOKENS) for i in range(times)]
        with bounded("F12"):
            stranger.call("read_many", [(f"local-{r.request_id}", r, stranger.table(TOKENS)) for r in remotes])
            for remote in remotes:
                assert reasons(stranger, f"local-{remote.request_id}") == {"handshake_timeout"}
        assert stranger.call("keeps_out", (replace(source[0], block_ids=()),))
        for remote in remotes:
            prefill.call("withdraw", remote.request_id)


@pytest.mark.parametrize("transport", ["nixl", "cma"])
def test_f11_noise_on_every_socket(times, transport):
    with pair(transport=transport) as engines:
        addresses = [address for engine in engines for address in engine.call("addresses")]
        for i in range(times):
            with bounded("F11", *engines, times=len(addresses)):
                for address in addresses:
                    pester(address)
                one_request(*engines, f"r{i}", num_tokens=TOKENS)
        assert engines[0].call("total", "malformed_messages") >= times


def test_f11_a_thousand_connections_some_of_which_dawdle(times):
    """Most say nothing; some give away a greeting byte by byte, and never finish it."""
    with pair() as (prefill, decode):
        addresses = prefill.call("addresses")
        for i in range(times):
            with contextlib.ExitStack() as stack:
                crowd = [stack.enter_context(connect(addresses[n % 3])) for n in range(1000)]
                for byte in range(4):
                    for loris in crowd[::20]:
                        with contextlib.suppress(OSError):
                            loris.send(b"\xff\0\0\0"[byte : byte + 1])
                    with bounded("F11"):
                        one_request(prefill, decode, f"r{i}-{byte}", num_tokens=TOKENS)


def ask(address, frame, wanted):
    """Return the first answer of a kind."""
    with Dialer() as dialer:
        dialer.send(address, frame)
        ends_at = time.monotonic() + 10
        while time.monotonic() < ends_at:
            wait(dialer.sockets, 0.1)
            for event in dialer.receive():
                if event.frame is not None and type(decoded(event.frame)).__name__ == wanted:
                    return decoded(event.frame)
    raise AssertionError(f"no {wanted} from {address}")


@pytest.mark.parametrize("transport", ["nixl", "cma"])
def test_f16_hellos_that_lie(transport, times):
    """A false front desk answers with a true engine's hello, in which one number is a lie."""
    with pair(transport=transport) as (prefill, decode), Listener(host="127.0.0.1") as false:
        hello = ask(Address("127.0.0.1", prefill.port), encode(HelloRequest(engine_id="x")), "Hello")
        destination = decode.table(TOKENS, first_block=3)
        for i in range(times):
            lie = list(LIES)[i % len(LIES)]
            engine_id = f"liar-{i}"
            told = msgspec.structs.replace(hello, engine_id=engine_id, layout=LIES[lie](hello.layout, i))
            source = prefill.table(TOKENS)
            remote = replace(prefill.call("reference", f"r{i}", source, TOKENS), engine_id=engine_id, port=false.port)
            decode.call("wipe")
            with bounded("F16", decode):
                decode.call("read", f"local-{i}", remote, destination)
                while (found := decode.call("failures", f"local-{i}")) is None:
                    wait([false.socket], 0.01)
                    for letter in false.receive():
                        false.send(letter.route, encode(told))
                assert set(found) <= {"handshake_failed", "incompatible", "transport_error", "bind_failed",
                                      "engine_restarted"}, lie  # fmt: skip
            assert decode.call("keeps_out", destination), lie
        one_request(prefill, decode, "after", num_tokens=TOKENS)


def test_f16_introductions_that_lie(times):
    with pair() as (prefill, decode):
        layout = ask(Address("127.0.0.1", decode.port), encode(HelloRequest(engine_id="x")), "Hello").layout
        control = prefill.call("addresses")[1]
        refused = 0
        for i in range(times):
            told = LIES[list(LIES)[i % len(LIES)]](layout, i)
            frame = encode(Introduce(producer=Party("prefill-0", 0), engine_id=f"liar-{i}", layout=told))
            with bounded("F16", prefill), Dialer() as dialer:
                dialer.send(control, frame)
                answers = []
                until(lambda d=dialer, a=answers: wait(d.sockets, 0.1) or a.extend(
                    e.frame for e in d.receive() if e.frame) or a)  # fmt: skip
                refused += type(decoded(answers[0])).__name__ == "IntroduceRefused"
        assert refused >= times // 2
        one_request(prefill, decode, "after", num_tokens=TOKENS)
