"""NIXL: what it costs when idle, where it prints, and the behaviours of NIXL 1.5.1 that we defend against."""

import gc
import importlib.util
import logging
import os
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest

from kvplan.errors import IllegalTransitionError, NotRegisteredError, PeerGoneError, TransportError, UnsupportedError
from kvplan.testing.processes import LocalPeer, PeerProcess, memory_range, pattern
from kvplan.testing.transport_claims import expect_raises, make_batch, move
from kvplan.transport import Device, MemoryRange, State, create

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="needs the package nixl-cu12"),
]

MIB = 1 << 20
TCP = {"ucx_tls": "tcp"}


@pytest.fixture
def connected():
    """Return a function that connects a transport to a peer's first region, as large as that."""
    made = []

    def connect(peer, **options):
        transport = create("nixl", **options)
        made.append(transport)
        local = np.zeros(peer.regions[0].num_bytes, np.uint8)
        transport.register([memory_range(local)])
        transport.connect("p", peer.metadata)
        return transport, local

    yield connect
    for transport in made:
        transport.close()


def whole(peer, local, run):
    offset = np.arange(0, local.nbytes, run)
    return make_batch("p", local.ctypes.data + offset, peer.regions[0].address + offset, np.full(len(offset), run))


def wire_up(transport, peer, local):
    assert move(transport, make_batch("p", [local.ctypes.data], [peer.regions[0].address], [64])).state is State.DONE


def until_terminal(transport, handle, bound_s):
    deadline = time.monotonic() + bound_s
    while transport.poll(handle).state is State.PENDING and time.monotonic() < deadline:
        time.sleep(0.001)
    return transport.poll(handle)


def test_idle_agents_cost_next_to_nothing(connected, capsys):
    """An idle agent after a transfer, on both sides; NIXL's own default burns a whole core for each."""
    with PeerProcess("nixl", sizes=(4096,)) as peer:
        transport, local = connected(peer)
        assert move(transport, whole(peer, local, 4096)).state is State.DONE
        theirs, ours, begun = peer.cpu_s(), time.process_time(), time.monotonic()
        time.sleep(2.0)
        wall = time.monotonic() - begun
        ours, theirs = (time.process_time() - ours) / wall, (peer.cpu_s() - theirs) / wall
    with capsys.disabled():
        print(f" [idle: reader {ours:.2%}, peer {theirs:.2%} of a core]", end="")
    assert ours < 0.10
    assert theirs < 0.10


def test_nothing_is_printed_on_standard_output():
    """Not by a transfer, an error, a close; and ``logging`` is left as it was."""
    program = """
import logging
import numpy as np
from kvplan.errors import TransportError
from kvplan.transport import Batch, MemoryRange, create
a, b = create("nixl"), create("nixl")
x, y = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
a.register([MemoryRange(x.ctypes.data, 4096)])
b.register([MemoryRange(y.ctypes.data, 4096)])
b.connect("a", a.metadata())
handle = b.post(Batch("a", np.array([y.ctypes.data]), np.array([x.ctypes.data]), np.array([4096])))
while not b.poll(handle).state.value == "done": pass
for address in (8, x.ctypes.data + 1):
    try:
        b.post(Batch("a", np.array([y.ctypes.data]), np.array([address]), np.array([4096])))
        raise SystemExit("a bad address was taken")
    except TransportError: pass
b.close(); a.close()
if not (y == 1).all() or not logging.raiseExceptions: raise SystemExit("wrong")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "UCX_LOG_LEVEL": "info"},
    )
    assert done.stdout == ""
    assert "UCX" in done.stderr


def test_every_error_class_of_nixl_is_known():
    from kvplan.transport.nixl_binding import _REASONS, load_bindings

    bindings = load_bindings()
    assert {n for n in dir(bindings) if n.startswith("nixl") and n.endswith("Error")} == set(_REASONS)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nixlRemoteDisconnectError", PeerGoneError),
        ("nixlNotFoundError", NotRegisteredError),
        ("nixlBackendError", TransportError),
    ],
)
def test_errors_are_translated_with_peer_and_reason(name, kind):
    from kvplan.transport.nixl_binding import load_bindings, translate

    error = getattr(load_bindings(), name)
    with (
        pytest.raises(kind, match=rf"doing it \(peer 'p'\): .* \[{name}: raw\]") as caught,
        translate("doing it", peer="p"),
    ):
        raise error("raw")
    assert caught.value.peer == "p"
    with pytest.raises(TransportError, match=r"unexpected \[RuntimeError: odd\]"), translate("doing it"):
        raise RuntimeError("odd")


def test_request_is_posted_once_and_released_once():
    """Both would be segmentation faults in NIXL."""
    from kvplan.transport.nixl_binding import NixlAgent

    peer = LocalPeer("nixl", sizes=(4096,))
    local = np.zeros(4096, np.uint8)
    agent = NixlAgent("kvplan-test-requests", progress_delay_us=10_000, ucx_tls=None, num_threads=0, backends=("UCX",))
    agent.register([memory_range(local)])
    name = agent.load(peer.metadata.split(b"\n", 3)[3], peer="p")
    request = agent.request(whole(peer, local, 4096), name)
    expect_raises(IllegalTransitionError, request.check, "created")
    state = request.start()
    expect_raises(IllegalTransitionError, request.start)
    if state is State.PENDING:
        expect_raises(IllegalTransitionError, request.release, "in flight")
    while state is State.PENDING:
        state = request.check()
    expect_raises(IllegalTransitionError, request.check, "ended")
    request.release()
    expect_raises(IllegalTransitionError, request.release, "released")
    expect_raises(IllegalTransitionError, request.start, "released")
    never_posted = agent.request(whole(peer, local, 4096), name)
    never_posted.release()
    assert (local == pattern(1, 4096)).all()
    peer.close()


def test_overlapping_ranges_in_one_call_are_one_registration(connected):
    peer = LocalPeer("nixl", sizes=(4096,))
    transport, _ = connected(peer)
    local = np.zeros(8192, np.uint8)
    base = local.ctypes.data
    transport.register([MemoryRange(base, 5000), MemoryRange(base + 4096, 4096)])
    batch = make_batch("p", [base, base + 4096], [peer.regions[0].address] * 2, [4096, 4096])
    assert move(transport, batch).state is State.DONE
    assert (local == np.tile(pattern(1, 4096), 2)).all()
    with pytest.raises(TransportError, match="register overlapping ranges in one call"):
        transport.register([MemoryRange(base + 100, 10_000)])
    peer.close()


def test_unknown_kind_of_memory_is_refused():
    with create("nixl") as transport, pytest.raises(NotRegisteredError, match="cpu and cuda memory, not tpu"):
        transport.register([MemoryRange(4096, 4096, Device("tpu", 0))])


def test_connecting_to_oneself_and_twice_is_refused(connected):
    peer = LocalPeer("nixl", sizes=(4096,))
    transport, _ = connected(peer)
    with pytest.raises(TransportError, match="this transport itself"):
        transport.connect("me", transport.metadata())
    with pytest.raises(TransportError, match="another name"):
        transport.connect("p2", peer.metadata)
    peer.close()


def test_damaged_metadata_never_reaches_nixl(connected):
    peer = LocalPeer("nixl", sizes=(4096,))
    transport, local = connected(peer)
    body = bytearray(peer.metadata)
    body[-20] ^= 1
    with pytest.raises(TransportError, match="damaged"):
        transport.connect("q", bytes(body))
    assert move(transport, whole(peer, local, 4096)).state is State.DONE
    peer.close()


def test_peer_that_unmapped_registered_memory(connected):
    """The process that reads gets an error and lives, and says which peer."""
    with PeerProcess("nixl", sizes=(1 << 16,)) as peer:
        transport, local = connected(peer)
        assert move(transport, whole(peer, local, 1024)).state is State.DONE
        peer.unmap(0)
        progress = move(transport, whole(peer, local, 1024))
        assert progress.state is State.FAILED
        assert "'p'" in progress.reason


def test_frozen_peer_over_tcp_stays_pending_and_then_ends(connected):
    """Nothing cancels it: the handle is PENDING for as long as the bytes may come, and DONE when they came."""
    with PeerProcess("nixl", sizes=(16 * MIB,), options=TCP) as peer:
        transport, local = connected(peer, **TCP)
        assert (
            move(transport, make_batch("p", [local.ctypes.data], [peer.regions[0].address], [64])).state is State.DONE
        )
        peer.freeze()
        handle = transport.post(whole(peer, local, MIB))
        assert until_terminal(transport, handle, 0.5).state is State.PENDING
        transport.disconnect("p")
        assert until_terminal(transport, handle, 0.2).state is State.PENDING
        peer.thaw()
        assert until_terminal(transport, handle, 20).state is State.DONE
        assert (local == pattern(1, local.nbytes)).all()


def test_peer_killed_in_the_middle_over_tcp(connected):
    """FAILED comes within the bound, and no byte is written after it."""
    with PeerProcess("nixl", sizes=(64 * MIB,), options=TCP) as peer:
        transport, local = connected(peer, **TCP)
        assert (
            move(transport, make_batch("p", [local.ctypes.data], [peer.regions[0].address], [64])).state is State.DONE
        )
        handle = transport.post(whole(peer, local, MIB))
        peer.kill()
        progress = until_terminal(transport, handle, 20)
        assert progress.state is State.FAILED
        assert "ended or closed the connection" in progress.reason
        local[:] = 7
        time.sleep(0.3)
        assert (local == 7).all()
        with pytest.raises(PeerGoneError):
            transport.post(whole(peer, local, MIB))


def test_close_while_a_frozen_peer_owes_bytes(caplog):
    """Close is bounded; the handle stays PENDING for ever and NIXL is kept, because memory may still be written."""
    with PeerProcess("nixl", sizes=(16 * MIB,), options=TCP) as peer:
        transport = create("nixl", close_timeout_s=0.3, **TCP)
        local = np.zeros(16 * MIB, np.uint8)
        transport.register([memory_range(local)])
        transport.connect("p", peer.metadata)
        wire_up(transport, peer, local)
        peer.freeze()
        handle = transport.post(whole(peer, local, MIB))
        begun = time.monotonic()
        with caplog.at_level(logging.WARNING):
            transport.close()
        assert time.monotonic() - begun < 2
        assert transport.poll(handle).state is State.PENDING
        assert "1 batches in flight (peers p)" in caplog.text
        kept = weakref.ref(transport)
        del transport, handle
        gc.collect()
        assert kept() is not None
        peer.thaw()
        deadline = time.monotonic() + 20
        while not local[-MIB:].any() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert local[-MIB:].any(), "the late write that all this is about did not come"


def test_ucx_tls_does_not_stay_in_the_environment(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "all")
    create("nixl", **TCP).close()
    assert os.environ["UCX_TLS"] == "all"
    monkeypatch.delenv("UCX_TLS")
    create("nixl", **TCP).close()
    assert "UCX_TLS" not in os.environ


def test_backends_are_named_and_a_wrong_one_is_refused() -> None:
    with create("nixl", backends=["UCX"]) as transport:
        assert transport.name == "nixl"
    with pytest.raises(UnsupportedError, match="give a list of names of NIXL backends"):
        create("nixl", backends="UCX")
    with pytest.raises(TransportError, match="starting NIXL"):
        create("nixl", backends=["NO_SUCH_BACKEND"])
