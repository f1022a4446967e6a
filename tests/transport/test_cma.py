"""CMA: identity of the peer, cutting into calls, partial copies, turns, and errors that say what to do."""

import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.errors import DescriptorError, NotRegisteredError, PeerGoneError, TransportError
from kvplan.testing.processes import LocalPeer, PeerProcess, memory_range, pattern
from kvplan.testing.transport_claims import make_batch, move
from kvplan.transport import Batch, Device, MemoryRange, State, create
from kvplan.transport.cma import window
from kvplan.transport.cma_syscalls import MAX_VECTORS, ptrace_scope, start_ticks

PREFIX = b"kvplan-cma-1\n"


@pytest.fixture(scope="module")
def peer():
    with PeerProcess("cma", sizes=(1 << 16, 1 << 16)) as peer:
        yield peer


@pytest.fixture
def local():
    return np.zeros(1 << 16, np.uint8)


def connected(local, peer, **options):
    transport = create("cma", **options)
    transport.register([memory_range(local)])
    transport.connect("p", peer.metadata)
    return transport


def changed(metadata, **fields):
    return PREFIX + json.dumps({**json.loads(metadata[len(PREFIX) :]), **fields}).encode()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_window_stands_for_exactly_the_bytes_asked_for(lengths, data):
    total = sum(lengths)
    done = data.draw(st.integers(0, total - 1))
    target = data.draw(st.integers(done + 1, total))
    to, origin = np.arange(len(lengths)) * 10, 1_000 + np.arange(len(lengths)) * 20
    batch = make_batch("p", to, origin, lengths)
    near, far = window(batch, np.cumsum(batch.num_bytes, dtype=np.uint64), done, target)
    every = [(a + i, b + i) for a, b, n in zip(to.tolist(), origin.tolist(), lengths, strict=True) for i in range(n)]
    found = [
        (a + i, b + i) for (a, n), (b, m) in zip(near.tolist(), far.tolist(), strict=True) for i in range(n) if n == m
    ]
    assert found == every[done:target]


def test_window_has_at_most_1024_vectors():
    batch = make_batch("p", np.arange(3_000) * 2, np.arange(3_000) * 2, np.ones(3_000, int))
    stops = np.cumsum(batch.num_bytes, dtype=np.uint64)
    near, far = window(batch, stops, 1_500, 3_000)
    assert near.shape == far.shape == (MAX_VECTORS, 2)
    assert near[0, 0] == 3_000


def test_turns_are_bounded_and_fair(peer, local):
    with connected(local, peer, max_batch_bytes=10_000) as transport:
        base, half = local.ctypes.data, 1 << 15
        handles = [
            transport.post(make_batch("p", [base + i * half], [peer.regions[i].address], [half])) for i in range(2)
        ]
        assert [h.num_done for h in handles] == [10_000, 10_000]
        for turn in (2, 3):
            for handle in handles:
                assert transport.poll(handle).state is State.PENDING
            assert [h.num_done for h in handles] == [turn * 10_000] * 2
        for handle in handles:
            assert transport.poll(handle).state is State.DONE
        assert (local == np.concatenate([pattern(1 + i, 1 << 16)[:half] for i in range(2)])).all()


def test_close_ends_a_batch_between_turns(peer, local):
    transport = connected(local, peer, max_batch_bytes=1_000)
    handle = transport.post(make_batch("p", [local.ctypes.data], [peer.regions[0].address], [1 << 16]))
    transport.close()
    assert transport.poll(handle).state is State.FAILED
    assert "closed" in transport.poll(handle).reason
    assert not local[1_000:].any()


def test_disconnect_lets_a_batch_between_turns_end(peer, local):
    with connected(local, peer, max_batch_bytes=30_000) as transport:
        handle = transport.post(make_batch("p", [local.ctypes.data], [peer.regions[0].address], [1 << 16]))
        transport.disconnect("p")
        while transport.poll(handle).state is State.PENDING:
            pass
        assert (local == pattern(1, 1 << 16)).all()


def test_peer_dies_between_turns(local):
    with PeerProcess("cma") as peer, connected(local, peer, max_batch_bytes=30_000) as transport:
        handle = transport.post(make_batch("p", [local.ctypes.data], [peer.regions[0].address], [1 << 16]))
        peer.kill()
        assert transport.poll(handle).state is State.FAILED
        assert "has ended" in transport.poll(handle).reason


def test_peer_closes_between_turns(local):
    """All bytes have come, but nobody vouches for the last ones: not DONE."""
    with PeerProcess("cma") as peer, connected(local, peer, max_batch_bytes=40_000) as transport:
        handle = transport.post(make_batch("p", [local.ctypes.data], [peer.regions[0].address], [1 << 16]))
        peer.close_transport()
        assert transport.poll(handle).state is State.FAILED
        assert "closed its transport" in transport.poll(handle).reason


def test_start_time_is_the_kernels():
    created = psutil.boot_time() + start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    assert created == pytest.approx(psutil.Process().create_time(), abs=2)


def test_frozen_peer_is_readable(local):
    with PeerProcess("cma") as peer, connected(local, peer) as transport:
        peer.freeze()
        batch = make_batch("p", [local.ctypes.data], [peer.regions[0].address], [1 << 16])
        assert move(transport, batch).state is State.DONE


def test_zombie_is_gone(local):
    """A killed child that nobody has reaped still has its pid and start time, but no memory."""
    with PeerProcess("cma") as peer, connected(local, peer) as transport:
        os.kill(peer.pid, 9)
        os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
        assert start_ticks(peer.pid) is not None
        with pytest.raises(PeerGoneError, match="has ended"):
            transport.post(make_batch("p", [local.ctypes.data], [peer.regions[0].address], [16]))


def test_peer_that_unmapped_registered_memory(local):
    """A copy that stops half-way is continued, meets the hole, and fails; the bytes before it are right."""
    with PeerProcess("cma") as peer, connected(local, peer) as transport:
        peer.unmap(0)
        step = np.arange(64) * 1024
        batch = make_batch("p", local.ctypes.data + step, peer.regions[0].address + step, np.full(64, 1024))
        with pytest.raises(TransportError, match="not mapped"):
            transport.post(batch)
        assert (local[: 1 << 15] == pattern(1, 1 << 16)[: 1 << 15]).all()
        assert not local[1 << 15 :].any()


def test_closed_peer_is_gone_though_its_process_lives(local):
    with PeerProcess("cma") as peer, connected(local, peer) as transport:
        peer.close_transport()
        with pytest.raises(PeerGoneError, match="closed its transport"):
            transport.post(make_batch("p", [local.ctypes.data], [peer.regions[0].address], [16]))


@pytest.mark.parametrize(
    "fields, kind, words",
    [
        pytest.param({"start_ticks": 1}, PeerGoneError, "belongs to another process", id="reused-pid"),
        pytest.param({"pid": 2**22 + 1}, PeerGoneError, "has ended", id="no-such-pid"),
        pytest.param({"nonce": "00" * 16}, PeerGoneError, "another program", id="other-nonce"),
        pytest.param({"nonce_address": 16}, PeerGoneError, "another program", id="unmapped-nonce"),
        pytest.param({"boot": "x"}, TransportError, "another host.*nixl", id="other-host"),
        pytest.param({"namespace": "x"}, TransportError, "another pid namespace", id="other-namespace"),
        pytest.param({"pid": 0}, TransportError, "out of bounds", id="pid-0"),
        pytest.param({"pid": -1}, TransportError, "damaged", id="pid-negative"),
        pytest.param({"pid": True}, TransportError, "damaged", id="pid-bool"),
        pytest.param({"nonce": "00"}, TransportError, "out of bounds", id="short-nonce"),
        pytest.param({"nonce": 5}, TransportError, "damaged", id="nonce-number"),
        pytest.param({"ranges": [[0, 0]]}, TransportError, "damaged", id="empty-range"),
        pytest.param({"ranges": [[1 << 63, 1 << 63], [0, 1 << 64]]}, TransportError, "damaged", id="huge-range"),
        pytest.param({"ranges": [[1]]}, TransportError, "damaged", id="half-range"),
        pytest.param({"ranges": [[0, 1]] * 70_000}, TransportError, "out of bounds", id="too-many-ranges"),
        pytest.param({"boot": None}, TransportError, "damaged", id="boot-null"),
    ],
)
def test_metadata_that_does_not_fit(peer, local, fields, kind, words):
    with connected(local, peer) as transport:
        with pytest.raises(kind, match=words) as caught:
            transport.connect("q", changed(peer.metadata, **fields))
        assert caught.value.peer == "q"
        assert transport.peers == ("p",)


@pytest.mark.parametrize("body", [b"[]", b"{}", b"[" * 100_000, b"\xff", b"null", b'{"pid": 1e999}'])
def test_metadata_that_is_no_object(body):
    with create("cma") as transport, pytest.raises(TransportError, match="damaged"):
        transport.connect("q", PREFIX + body)


def test_remote_range_is_checked_before_the_kernel_sees_it(peer, local):
    with connected(local, peer) as transport:
        batch = make_batch("p", [local.ctypes.data], [peer.regions[0].address + 1], [1 << 16])
        with pytest.raises(NotRegisteredError, match="descriptor 0: remote bytes"):
            transport.post(batch)


def test_device_memory_is_refused():
    with create("cma") as transport, pytest.raises(NotRegisteredError, match="cuda:0"):
        transport.register([MemoryRange(4096, 4096, Device("cuda", 0))])


def test_turn_of_no_bytes_is_refused():
    with pytest.raises(DescriptorError, match="max_batch_bytes is 0"):
        create("cma", max_batch_bytes=0)


def test_peer_in_the_same_process(local):
    peer = LocalPeer("cma", sizes=(1 << 16,))
    with connected(local, peer) as transport:
        assert move(
            transport, Batch("p", *map(np.asarray, ([local.ctypes.data], [peer.regions[0].address], [4096])))
        ).state
        assert (local[:4096] == pattern(1, 1 << 16)[:4096]).all()
    peer.close()


def test_allowing_tracers_works_on_kernels_with_and_without_yama():
    with create("cma", allow_any_tracer=True) as transport:
        assert transport.metadata()
    assert ptrace_scope() in {None, 0, 1, 2, 3}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who is not allowed")
def test_no_permission_says_what_to_do(peer):
    """The same program reads the peer as another user, after it has loaded everything."""
    program = """
import os, sys
from kvplan.errors import TransportError
from kvplan.transport import create
transport = create("cma")
os.setgid(65534); os.setuid(65534)
try:
    transport.connect("p", bytes.fromhex(sys.stdin.read()))
except TransportError as error:
    print(type(error).__name__, error)
"""
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60, check=True)
    said = run([sys.executable, "-c", program], input=peer.metadata.hex()).stdout
    assert said.startswith("TransportError")
    for words in ("not allowed", "ptrace_scope", "allow_any_tracer=True", "CAP_SYS_PTRACE"):
        assert words in said
