"""The carrier that can be told to lie: honest until then; and then exactly the named bytes are wrong."""

import numpy as np

from kvplan.testing.corruption import CorruptingTransport
from kvplan.testing.processes import LocalPeer
from kvplan.testing.transport_conformance import TransportConformance
from kvplan.transport import Batch, MemoryRange, State, create
from kvplan.transport.memory import MemoryTransport


class TestHonest(TransportConformance):
    def make_transport(self):
        return CorruptingTransport(create("memory"))

    def make_peer(self, *sizes, seed=1):
        return LocalPeer("memory", sizes=sizes, seed=seed)


def moved(transport, peer, local, offset):
    """Read 64 bytes of a peer, in two runs that change places."""
    here, there = local.ctypes.data + offset, peer.regions[0].address
    return transport.post(Batch("p", [here + 32, here], [there, there + 32], [32, 32]))


def test_exactly_the_named_bytes_arrive_wrong_and_not_before_they_are_done():
    peer, local = LocalPeer("memory", sizes=(64,)), np.zeros(128, np.uint8)
    held = MemoryTransport(on_post=lambda batch: State.PENDING)
    with CorruptingTransport(held) as transport:
        transport.register([MemoryRange(local.ctypes.data, local.nbytes)])
        transport.connect("p", peer.metadata)
        right = np.roll(peer.read(0), 32)
        transport.corrupt("another", peer.regions[0].address, 64)
        transport.corrupt("p", peer.regions[0].address + 30, 4)
        handle = moved(transport, peer, local, 0)
        assert transport.poll(handle).state is State.PENDING
        held.complete(handle)
        assert (local[:64] == right).all()
        assert transport.poll(handle).state is State.DONE
        assert np.flatnonzero(local[:64] != right).tolist() == [0, 1, 62, 63]
        assert transport.num_corrupted == 4
        transport.poll(handle)
        assert transport.num_corrupted == 4
        transport.heal()
        handle = moved(transport, peer, local, 64)
        held.complete(handle)
        assert transport.poll(handle).state is State.DONE
        assert (local[64:] == right).all()
    peer.close()
