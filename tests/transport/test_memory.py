"""The memory transport's faults: what session tests rely on."""

import threading

import numpy as np
import pytest

from kvplan.errors import DescriptorError, NotRegisteredError, PeerGoneError, TransportError
from kvplan.testing.processes import LocalPeer, memory_range, pattern
from kvplan.transport import Batch, Device, MemoryRange, State, create


@pytest.fixture
def peer():
    peer = LocalPeer("memory", sizes=(4096,))
    yield peer
    peer.close()


@pytest.fixture
def local():
    return np.zeros(4096, np.uint8)


@pytest.fixture
def make(peer, local):
    made = []

    def connect(**options):
        transport = create("memory", **options)
        transport.register([memory_range(local)])
        transport.connect("p", peer.metadata)
        made.append(transport)
        return transport

    yield connect
    for transport in made:
        transport.close()


@pytest.fixture
def batch(peer, local):
    offset = np.arange(4) * 1024
    return Batch("p", local.ctypes.data + offset, peer.regions[0].address + offset, np.full(4, 1024))


def hold(_batch):
    return State.PENDING


def test_on_post_sees_the_batch_before_any_byte_moves(make, batch, local):
    seen = []
    transport = make(on_post=lambda b: seen.append((b, local.any())))
    assert transport.post(batch).progress.state is State.DONE
    assert seen == [(batch, False)]
    assert (local == pattern(1, 4096)).all()


def test_held_batch_moves_when_the_test_says(make, batch, local):
    transport = make(on_post=hold)
    handle = transport.post(batch)
    assert transport.poll(handle).state is State.PENDING
    assert transport.pending() == (handle,)
    assert not local.any()
    transport.complete(handle)
    assert transport.poll(handle).state is State.DONE
    assert transport.pending() == ()
    assert (local == pattern(1, 4096)).all()


def test_partial_failure(make, batch, local):
    transport = make(on_post=hold)
    handle = transport.post(batch)
    transport.complete(handle, State.FAILED, reason="cable cut", num_copied=1)
    assert transport.poll(handle) == (State.FAILED, "cable cut")
    assert (local[:1024] == pattern(1, 4096)[:1024]).all()
    assert not local[1024:].any()


def test_late_write_into_memory_that_was_reused(make, batch, local):
    transport = make(on_post=hold)
    handle = transport.post(batch)
    transport.close()
    local[:] = 7
    transport.complete(handle, State.PENDING, num_copied=2)
    assert transport.poll(handle).state is State.PENDING
    assert (local[:2048] == pattern(1, 4096)[:2048]).all()
    assert (local[2048:] == 7).all()


def test_failure_at_post(make, batch, local):
    transport = make(on_post=lambda _: State.FAILED)
    assert transport.post(batch).progress == (State.FAILED, "failed by on_post")
    assert not local.any()


def test_error_at_post(make, batch):
    def refuse(b):
        raise TransportError("no route", peer=b.peer)

    transport = make(on_post=refuse)
    with pytest.raises(TransportError, match="no route"):
        transport.post(batch)
    assert transport.num_pending == 0


def test_peer_closes_while_a_batch_is_held(make, batch, peer, local):
    transport = make(on_post=hold)
    handle = transport.post(batch)
    peer.kill()
    assert transport.poll(handle).state is State.PENDING
    transport.complete(handle)
    assert transport.poll(handle).state is State.FAILED
    assert "closed" in transport.poll(handle).reason
    assert not local.any()


def test_complete_is_once_and_for_held_batches(make, batch):
    transport = make(on_post=hold)
    handle = transport.post(batch)
    transport.complete(handle)
    with pytest.raises(DescriptorError, match="not held back"):
        transport.complete(handle)


def test_disconnect_waits_for_the_last_batch(make, batch, peer, local):
    transport = make(on_post=hold)
    first, second = transport.post(batch), transport.post(batch)
    transport.disconnect("p")
    assert transport.peers == ()
    with pytest.raises(TransportError, match="not connected"):
        transport.post(batch)
    with pytest.raises(TransportError, match="in flight"):
        transport.connect("p", peer.metadata)
    transport.complete(first)
    assert (local == pattern(1, 4096)).all()
    transport.complete(second, State.FAILED)
    transport.connect("p", peer.metadata)
    assert transport.peers == ("p",)


def test_complete_from_another_thread(make, batch):
    transport = make(on_post=hold)
    handle = transport.post(batch)
    thread = threading.Thread(target=transport.complete, args=(handle,))
    thread.start()
    thread.join(10)
    assert transport.poll(handle).state is State.DONE


def test_device_memory_is_refused():
    with create("memory") as transport, pytest.raises(NotRegisteredError, match="cuda:1"):
        transport.register([MemoryRange(4096, 4096, Device("cuda", 1))])


def test_peer_that_is_not_open(peer):
    metadata = peer.metadata
    peer.close()
    with create("memory") as transport, pytest.raises(PeerGoneError, match="not open"):
        transport.connect("p", metadata)
