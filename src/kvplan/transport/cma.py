"""The CMA transport: peers on the same host, bytes copied by the kernel between two processes. No NIXL needed.

One batch, step by step:

1. the peer's identity is proved (`_prove`): same start time, and our nonce still lies where it promised;
2. bytes are copied in calls of up to 1,024 vectors, at most ``max_batch_bytes`` in ``post`` and in each ``poll``,
   so that batches of several peers take turns; a call that moves less than asked is continued where it stopped;
3. identity is proved again, and only then the batch is DONE: had the process been replaced in between, its
   pid would have another start time and no nonce.

Every copy is synchronous. So a batch that has failed, or whose transport is closed, is never written later.
"""

from __future__ import annotations

import ctypes
import errno
import secrets
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvplan.errors import DescriptorError, NotRegisteredError, PeerGoneError, TransportError
from kvplan.transport.base import Batch, Direction, Handle, MemoryRange, State
from kvplan.transport.checked import CheckedTransport, finished
from kvplan.transport.cma_metadata import NONCE_BYTES, CmaMetadata
from kvplan.transport.cma_syscalls import MAX_VECTORS, Process, copy_vectors, let_any_tracer, start_ticks
from kvplan.transport.ranges import RangeTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class CmaHandle(Handle):
    """A batch and how far it is: ``num_done`` of its bytes, counted in the order of its descriptors."""

    __slots__ = ("batch", "num_done", "stops")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.stops: NDArray[np.uint64] = np.cumsum(batch.num_bytes, dtype=np.uint64)
        self.num_done = 0
        super().__init__(batch.peer, int(self.stops[-1]))


class CmaTransport(CheckedTransport):
    """Copies between processes of one host with ``process_vm_readv`` and ``process_vm_writev``.

    ``max_batch_bytes`` bounds what one ``post`` or ``poll`` copies (about 10 ms for the default).
    ``allow_any_tracer`` lets every process of this user touch our memory where yama's ptrace_scope is 1; it is
    off, because that holds for debuggers too.
    """

    name: ClassVar[str] = "cma"

    def __init__(self, *, max_batch_bytes: int = 64 << 20, allow_any_tracer: bool = False) -> None:
        super().__init__()
        if max_batch_bytes < 1:
            raise DescriptorError(f"max_batch_bytes is {max_batch_bytes}; at least 1 is needed")
        if allow_any_tracer:
            let_any_tracer()
        self._max_batch_bytes = max_batch_bytes
        self._process = Process.current()
        self._nonce = ctypes.create_string_buffer(secrets.token_bytes(NONCE_BYTES), NONCE_BYTES)
        self._remote: dict[str, tuple[CmaMetadata, RangeTable]] = {}

    def _register(self, ranges: Sequence[MemoryRange]) -> None:
        for item in ranges:
            if item.device.kind != "cpu":
                raise NotRegisteredError(f"the cma transport moves host memory only, not {item.device}")

    def _metadata(self) -> bytes:
        address = ctypes.addressof(self._nonce)
        return CmaMetadata(self._process, self._nonce.raw, address, tuple(self._ranges)).encode()

    def _connect(self, peer: str, metadata: bytes) -> None:
        remote = CmaMetadata.decode(peer, metadata)
        for what, ours, theirs in (
            ("host", self._process.boot, remote.process.boot),
            ("pid namespace", self._process.namespace, remote.process.namespace),
        ):
            if ours != theirs:
                raise TransportError(
                    f"peer {peer!r} is in another {what} ({theirs}, ours is {ours}); use transport 'nixl'", peer=peer
                )
        _prove(peer, remote)
        self._remote[peer] = (remote, RangeTable(remote.ranges))

    def _disconnect(self, peer: str) -> None:
        self._remote.pop(peer, None)

    def _post(self, batch: Batch) -> Handle:
        remote, ranges = self._remote[batch.peer]
        ranges.check("remote", batch.peer, batch.remote_device, batch.remote_address, batch.num_bytes)
        _prove(batch.peer, remote)
        handle = CmaHandle(batch)
        self._copy_turn(handle)
        return handle

    def _poll(self, handle: Handle) -> None:
        if not isinstance(handle, CmaHandle):
            return
        try:
            self._copy_turn(handle)
        except TransportError as error:
            finished(handle, State.FAILED, str(error))

    def _copy_turn(self, handle: CmaHandle) -> None:
        """Copy up to ``max_batch_bytes``; make ``handle`` DONE when that was the rest and the peer proves itself."""
        remote, _ = self._remote[handle.peer]
        target = min(handle.num_done + self._max_batch_bytes, handle.num_bytes)
        batch = handle.batch
        while handle.num_done < target:
            local, far = window(batch, handle.stops, handle.num_done, target)
            moved = copy_vectors(batch.direction, remote.process.pid, local, far, peer=handle.peer)
            handle.num_done += moved
        if handle.num_done == handle.num_bytes:
            _prove(handle.peer, remote)
            finished(handle, State.DONE)

    def _close(self) -> None:
        for handle in self._pending:
            finished(handle, State.FAILED, "the cma transport was closed before the batch was copied")
        ctypes.memset(self._nonce, 0, NONCE_BYTES)


def window(
    batch: Batch, stops: NDArray[np.uint64], num_done: int, target: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the vectors of one call, local and remote, each (n, 2): address, bytes; n is at most 1,024.

    They stand for the bytes ``[num_done, target)`` of the batch, or the first of them: descriptors in order, the
    first and the last one cut to fit. ``stops`` is the running sum of ``batch.num_bytes``.

    >>> batch = Batch("p", [0, 100, 200], [1000, 2000, 3000], [10, 10, 10])
    >>> window(batch, np.array([10, 20, 30], dtype=np.uint64), 15, 24)[1].tolist()
    [[2005, 5], [3000, 4]]
    """
    first = int(np.searchsorted(stops, np.uint64(num_done), side="right"))
    last = min(int(np.searchsorted(stops, np.uint64(target), side="left")), first + MAX_VECTORS - 1)
    num_bytes = batch.num_bytes[first : last + 1].copy()
    skipped = np.uint64(num_done - (int(stops[first]) - int(num_bytes[0])))
    num_bytes[0] -= skipped
    num_bytes[-1] -= np.uint64(max(int(stops[last]) - target, 0))
    local = np.stack((batch.local_address[first : last + 1], num_bytes), axis=1)
    remote = np.stack((batch.remote_address[first : last + 1], num_bytes), axis=1)
    local[0, 0] += skipped
    remote[0, 0] += skipped
    return local, remote


def _prove(peer: str, remote: CmaMetadata) -> None:
    """Raise PeerGoneError unless the process is the one that sent ``remote`` and its transport is open."""
    process = remote.process
    started = start_ticks(process.pid)
    if started != process.start_ticks:
        what = "has ended" if started is None else "has ended, and its pid belongs to another process"
        raise PeerGoneError(f"peer {peer!r}: process {process.pid} {what}", peer=peer)
    found = ctypes.create_string_buffer(NONCE_BYTES)
    local = np.array([[ctypes.addressof(found), NONCE_BYTES]], dtype=np.uint64)
    far = np.array([[remote.nonce_address, NONCE_BYTES]], dtype=np.uint64)
    gone = f"peer {peer!r}: process {process.pid} has closed its transport, or runs another program"
    try:
        moved = copy_vectors(Direction.READ, process.pid, local, far, peer=peer)
    except TransportError as error:
        if error.errno == errno.EFAULT:
            raise PeerGoneError(gone, peer=peer) from error
        raise
    if moved != NONCE_BYTES or not secrets.compare_digest(found.raw, remote.nonce):
        raise PeerGoneError(gone, peer=peer)
