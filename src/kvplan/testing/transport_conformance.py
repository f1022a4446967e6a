"""What every transport must do, as one suite that touches memory directly; carriers are given to it.

Subclass `TransportConformance` in a test module, say how to make a transport and its peer, and pytest runs it::

    class TestMine(TransportConformance):
        def make_transport(self):
            return MyTransport()

        def make_peer(self, *sizes, seed=1):
            return PeerProcess("mine", sizes=sizes, seed=seed)

A batch may fail in ``post`` (TransportError) or in ``poll`` (FAILED): both are refusals, see `move`.
The suite needs nothing but kvplan; it does not import pytest.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import DescriptorError, NotRegisteredError, TransportError
from kvplan.testing.processes import Peer, memory_range, pattern
from kvplan.testing.transport_claims import (
    BOUND_S,
    POLL_S,
    ConformanceError,
    expect,
    expect_raises,
    make_batch,
    move,
)
from kvplan.transport import Batch, Device, Direction, MemoryRange, State, Transport

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_CLOSE_BOUND_S = 10.0


class TransportConformance:
    """Subclass it, and give `make_transport` and `make_peer`."""

    def make_transport(self) -> Transport:
        """Return a new transport of the kind under test."""
        raise NotImplementedError

    def make_peer(self, *sizes: int, seed: int = 1) -> Peer:
        """Return a peer of the same kind with a region of each of ``sizes``, best in another process."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Begin a test; pytest calls it."""
        self._stack = ExitStack()

    def teardown_method(self) -> None:
        """End a test; pytest calls it."""
        self._stack.close()

    # ---- bytes -------------------------------------------------------------------------------------------

    def test_few_large_descriptors(self) -> None:
        """Two descriptors of half a MiB arrive."""
        self._check_read([0, 600_000], [524_288, 100], [524_288, 300_001], size=1 << 20)

    def test_many_shuffled_descriptors_that_cannot_merge(self) -> None:
        """3,000 runs of 100 bytes, in different random orders on both sides, arrive; more than one call's vectors."""
        rng = np.random.default_rng(3)
        count = 3_000
        self._check_read(rng.permutation(count) * 131, rng.permutation(count) * 149, np.full(count, 100), size=1 << 19)

    def test_one_byte_descriptors(self) -> None:
        """2,000 single bytes at odd distances arrive."""
        rng = np.random.default_rng(4)
        self._check_read(rng.permutation(2_000) * 3, rng.permutation(2_000) * 7, np.ones(2_000, int), size=1 << 14)

    def test_random_lengths(self) -> None:
        """Runs of 1 to 5,000 bytes arrive, from overlapping sources too: several readers of one byte are fine."""
        rng = np.random.default_rng(5)
        lengths = rng.integers(1, 5_000, 400)
        to = np.cumsum(lengths + rng.integers(0, 3, 400)) - lengths
        self._check_read(to, rng.integers(0, (1 << 20) - 5_000, 400), lengths, size=1 << 20)

    def test_write(self) -> None:
        """A WRITE puts local bytes to the peer and nothing else."""
        transport, peer, local = self._pair(1 << 16)
        ours = pattern(99, local.nbytes)
        local[:] = ours
        order = np.random.default_rng(6).permutation(500)
        to, origin = order * 131, np.arange(500) * 127
        batch = self._batch(local, origin, peer, to, np.full(500, 101), Direction.WRITE)
        expect(move(transport, batch).state is State.DONE, "a write was not done")
        expected = pattern(peer.seed, 1 << 16)
        for a, b in zip(to.tolist(), origin.tolist(), strict=True):
            expected[a : a + 101] = ours[b : b + 101]
        self._equal(peer.read(0), expected, "at the peer")
        self._equal(local, ours, "locally, where it was only read")

    def test_several_regions(self) -> None:
        """One batch touches three regions of the peer and two of ours."""
        peer = self._peer(4096, 8192, 12288)
        transport = self._transport()
        local = [np.zeros(16384, np.uint8), np.zeros(4096, np.uint8)]
        transport.register([memory_range(a) for a in local])
        transport.connect("p", peer.metadata)
        rows = [(0, 5, 0, 7, 4000), (0, 5000, 1, 100, 8000), (1, 1, 2, 9000, 3000), (0, 14000, 2, 0, 2000)]
        batch = make_batch(
            "p",
            [local[a].ctypes.data + x for a, x, _, _, _ in rows],
            [peer.regions[r].address + y for _, _, r, y, _ in rows],
            [n for *_, n in rows],
        )
        expect(move(transport, batch).state is State.DONE, "a batch over several regions was not done")
        expected = [np.zeros(16384, np.uint8), np.zeros(4096, np.uint8)]
        for a, x, r, y, n in rows:
            expected[a][x : x + n] = pattern(peer.seed + r, peer.regions[r].num_bytes)[y : y + n]
        for ours, wanted in zip(local, expected, strict=True):
            self._equal(ours, wanted, "in one of our regions")

    def test_several_peers_at_once(self) -> None:
        """Batches from two peers are in flight together and do not mix."""
        peers = {"a": self._peer(1 << 16, seed=11), "b": self._peer(1 << 16, seed=22)}
        transport = self._transport()
        local = {name: np.zeros(1 << 16, np.uint8) for name in peers}
        transport.register([memory_range(a) for a in local.values()])
        for name, peer in peers.items():
            transport.connect(name, peer.metadata)
        handles = [
            transport.post(
                make_batch(
                    name,
                    local[name].ctypes.data + np.arange(part, 1 << 16, 4096),
                    peers[name].regions[0].address + np.arange(part, 1 << 16, 4096),
                    np.full(16, 1024),
                )
            )
            for part in (0, 1024, 2048, 3072)
            for name in peers
        ]
        deadline = time.monotonic() + BOUND_S
        while not all(transport.poll(h).state is State.DONE for h in handles):
            expect(time.monotonic() < deadline, "batches of two peers are not done in time")
            time.sleep(POLL_S)
        for name, peer in peers.items():
            self._equal(local[name], pattern(peer.seed, 1 << 16), f"from peer {name}")

    # ---- refusals ----------------------------------------------------------------------------------------

    def test_empty_batch_is_done_at_once(self) -> None:
        """A batch without descriptors is DONE before the first poll."""
        transport, _, _ = self._pair(4096)
        handle = transport.post(make_batch("p", [], [], []))
        expect(handle.progress.state is State.DONE, "an empty batch is not done at once")
        expect(transport.poll(handle).state is State.DONE, "an empty batch does not poll as done")

    def test_local_bytes_outside(self) -> None:
        """Local bytes before, after and across registered ranges are refused, and nothing is written."""
        transport, peer, local = self._pair(8192)
        base, far = local.ctypes.data, peer.regions[0].address
        for address, num_bytes in ((base - 1, 1), (base + 8192, 1), (base + 8000, 193), (0, 8)):
            batch = make_batch("p", [base, address], [far, far], [1, num_bytes])
            expect_raises(NotRegisteredError, partial(transport.post, batch), "descriptor 1", f"{address:#x}")
        on_gpu = make_batch("p", [base], [far], [1], local_device=Device("cuda", 3))
        expect_raises(NotRegisteredError, lambda: transport.post(on_gpu), "cuda:3")
        expect(not local.any(), "a refused batch wrote something")

    def test_across_two_local_ranges(self) -> None:
        """A descriptor must lie inside one range, even where two ranges touch."""
        peer, transport, local = self._peer(8192), self._transport(), np.zeros(8192, np.uint8)
        base = local.ctypes.data
        transport.register([MemoryRange(base, 4096), MemoryRange(base + 4096, 4096)])
        transport.connect("p", peer.metadata)
        batch = make_batch("p", [base + 4000], [peer.regions[0].address], [200])
        expect_raises(NotRegisteredError, lambda: transport.post(batch), "descriptor 0")

    def test_remote_bytes_outside(self) -> None:
        """Remote bytes outside the peer's ranges fail, the peer lives, and the next batch works."""
        transport, peer, local = self._pair(8192)
        far = peer.regions[0].address
        for address, num_bytes in ((far - 1, 2), (far + 8192, 1), (far + 8000, 193), (8, 8)):
            batch = make_batch("p", [local.ctypes.data], [address], [num_bytes])
            expect(move(transport, batch).state is State.FAILED, f"read of {address:#x} outside succeeded")
            expect(move(transport, batch).reason, "a failed batch has no reason")
        expect(not local.any(), "a refused batch wrote something")
        self._expect_whole_read(transport, peer, local)

    def test_remote_device_that_is_not_there(self) -> None:
        """A remote device without registered memory fails."""
        transport, peer, local = self._pair(4096)
        batch = make_batch("p", [local.ctypes.data], [peer.regions[0].address], [16], remote_device=Device("cuda", 5))
        expect(move(transport, batch).state is State.FAILED, "read from a device that is not there succeeded")

    def test_contradicting_batches(self) -> None:
        """Lengths that differ, zero bytes, overflow, double destinations and odd types never become a batch."""
        top = (1 << 64) - 8
        for arrays, words in (
            (([0, 8], [0], [8]), "differ in length"),
            (([0, 8], [0, 8], [8, 0]), "descriptor 1 has 0 bytes"),
            (([top], [0], [9]), "local address 0xfffffffffffffff8 + 9"),
            (([0], [top], [9]), "remote address 0xfffffffffffffff8 + 9"),
            (([0, 64, 7], [0, 8, 16], [8, 8, 8]), "descriptor 2"),
            (([64, 64], [0, 8], [8, 8]), "0x40"),
            (([-1], [0], [1]), "-1"),
            (([0.5], [0], [1]), "float64"),
        ):
            expect_raises(DescriptorError, partial(make_batch, "p", *arrays), words)

    def test_unknown_peer(self) -> None:
        """A batch to a name that is not connected is refused, and the known names are listed."""
        transport, peer, local = self._pair(4096)
        batch = make_batch("nobody", [local.ctypes.data], [peer.regions[0].address], [16])
        expect_raises(TransportError, lambda: transport.post(batch), "nobody", "connected: p")

    def test_metadata_that_is_noise(self) -> None:
        """Noise, a cut and another carrier's metadata are refused; the transport goes on working."""
        transport, peer, local = self._pair(4096)
        good = peer.metadata
        noise = np.random.default_rng(7).bytes(1 << 20)
        for bad in (b"", noise, good[: len(good) // 2], good[:-1], b"kvplan-other-1\n{}", good.replace(b"1", b"2")):
            expect_raises(TransportError, partial(transport.connect, "other", bad), "other")
        self._expect_whole_read(transport, peer, local)

    # ---- peers come and go -------------------------------------------------------------------------------

    def test_connect_is_idempotent(self) -> None:
        """The same metadata again does nothing; other metadata under the same name is refused."""
        transport, peer, local = self._pair(4096)
        transport.connect("p", peer.metadata)
        second = self._peer(4096, seed=5)
        expect_raises(TransportError, lambda: transport.connect("p", second.metadata), "disconnect")
        self._expect_whole_read(transport, peer, local)

    def test_disconnect_and_come_back(self) -> None:
        """A disconnected peer is unknown, can be connected again, and unknown names are ignored."""
        transport, peer, local = self._pair(4096)
        self._expect_whole_read(transport, peer, local)
        transport.disconnect("p")
        transport.disconnect("p")
        batch = self._batch(local, [0], peer, [0], [16])
        expect_raises(TransportError, lambda: transport.post(batch), "not connected")
        transport.connect("p", peer.metadata)
        self._expect_whole_read(transport, peer, local)

    def test_peer_killed_before_the_first_batch(self) -> None:
        """A batch to a peer that died after connect fails within the bound, with a reason."""
        transport, peer, local = self._pair(4096)
        peer.kill()
        self._expect_failure(transport, peer, local)

    def test_peer_killed_while_idle(self) -> None:
        """A peer that worked and died fails the next batch within the bound, and the one after it."""
        transport, peer, local = self._pair(4096)
        self._expect_whole_read(transport, peer, local)
        peer.kill()
        self._expect_failure(transport, peer, local)
        self._expect_failure(transport, peer, local)

    def test_peer_that_restarts(self) -> None:
        """After a peer died, its successor under a new name serves its own bytes; the dead one is forgotten."""
        transport, peer, local = self._pair(4096)
        peer.kill()
        self._expect_failure(transport, peer, local)
        transport.disconnect("p")
        second = self._peer(4096, seed=77)
        transport.connect("p2", second.metadata)
        self._expect_whole_read(transport, second, local, name="p2")

    # ---- our own life ------------------------------------------------------------------------------------

    def test_register_later_and_twice(self) -> None:
        """A range may be registered twice, and more of them after connect for our own side."""
        transport, peer, local = self._pair(4096)
        transport.register([memory_range(local)])
        more = np.zeros(4096, np.uint8)
        transport.register([memory_range(more)])
        self._expect_whole_read(transport, peer, more)
        self._expect_whole_read(transport, peer, local)

    def test_close_with_work(self) -> None:
        """Close right after a post is bounded and idempotent, and every verb but poll is refused afterwards."""
        transport, peer, local = self._pair(1 << 22)
        batch = self._batch(local, np.arange(1024) * 4096, peer, np.arange(1024)[::-1] * 4096, np.full(1024, 4000))
        handle = transport.post(batch)
        begun = time.monotonic()
        transport.close()
        transport.close()
        expect(time.monotonic() - begun < _CLOSE_BOUND_S, "close took too long")
        expect(transport.poll(handle) == transport.poll(handle), "poll after close is not stable")
        for action in (
            lambda: transport.post(batch),
            lambda: transport.connect("q", peer.metadata),
            transport.metadata,
        ):
            expect_raises(TransportError, action, "closed")
        transport.disconnect("p")

    def test_context_manager(self) -> None:
        """Leaving the block closes it."""
        with self.make_transport() as transport:
            expect(transport.metadata(), "metadata is empty")
        expect_raises(TransportError, transport.metadata, "closed")

    def test_closed_peer_ends_in_one_of_two_ways(self) -> None:
        """After the peer closed its transport but lives, a read gives its right bytes or fails, within the bound."""
        transport, peer, local = self._pair(4096)
        self._expect_whole_read(transport, peer, local)
        local[:] = 0
        peer.close_transport()
        if move(transport, self._batch(local, [0], peer, [0], [4096])).state is State.DONE:
            self._equal(local, pattern(peer.seed, 4096), "from a closed peer")

    # ---- helpers -----------------------------------------------------------------------------------------

    def _transport(self) -> Transport:
        return self._stack.enter_context(self.make_transport())

    def _peer(self, *sizes: int, seed: int = 1) -> Peer:
        peer = self.make_peer(*sizes, seed=seed)
        self._stack.callback(peer.close)
        return peer

    def _pair(self, num_bytes: int) -> tuple[Transport, Peer, NDArray[np.uint8]]:
        peer, transport = self._peer(num_bytes), self._transport()
        local = np.zeros(num_bytes, dtype=np.uint8)
        transport.register([memory_range(local)])
        transport.connect("p", peer.metadata)
        return transport, peer, local

    @staticmethod
    def _batch(
        local: NDArray[np.uint8],
        local_offset: ArrayLike,
        peer: Peer,
        remote_offset: ArrayLike,
        num_bytes: ArrayLike,
        direction: Direction = Direction.READ,
    ) -> Batch:
        to = np.asarray(local_offset) + local.ctypes.data
        origin = np.asarray(remote_offset) + peer.regions[0].address
        return make_batch("p", to, origin, np.asarray(num_bytes), direction=direction)

    def _check_read(self, to: ArrayLike, origin: ArrayLike, num_bytes: ArrayLike, *, size: int) -> None:
        transport, peer, local = self._pair(size)
        progress = move(transport, self._batch(local, to, peer, origin, num_bytes))
        expect(progress.state is State.DONE, f"the batch failed: {progress.reason}")
        source, expected = pattern(peer.seed, size), np.zeros(size, np.uint8)
        for a, b, n in zip(*(np.asarray(x).tolist() for x in (to, origin, num_bytes)), strict=True):
            expected[a : a + n] = source[b : b + n]
        self._equal(local, expected, "locally")
        self._equal(peer.read(0), source, "at the peer, which was only read")

    def _expect_whole_read(self, transport: Transport, peer: Peer, local: NDArray[np.uint8], name: str = "p") -> None:
        local[:] = 0
        batch = make_batch(name, [local.ctypes.data], [peer.regions[0].address], [local.nbytes])
        progress = move(transport, batch)
        expect(progress.state is State.DONE, f"reading one region failed: {progress.reason}")
        self._equal(local, pattern(peer.seed, local.nbytes), f"from {name}")

    def _expect_failure(self, transport: Transport, peer: Peer, local: NDArray[np.uint8]) -> None:
        local[:] = 0
        progress = move(transport, self._batch(local, [0], peer, [0], [local.nbytes]))
        expect(progress.state is State.FAILED, "a read from a dead peer succeeded")
        expect(progress.reason, "a failed batch has no reason")
        expect(not local.any(), "a read from a dead peer wrote something")

    @staticmethod
    def _equal(found: NDArray[np.uint8], wanted: NDArray[np.uint8], where: str) -> None:
        wrong = np.flatnonzero(found != wanted)
        if wrong.size:
            i = int(wrong[0])
            raise ConformanceError(f"{wrong.size} bytes wrong {where}; first at {i}: {found[i]} instead of {wanted[i]}")
