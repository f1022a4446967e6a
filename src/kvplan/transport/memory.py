"""The reference transport lives here: peers of one process, bytes copied between their addresses.

It is public and supported, and it is what session tests use to model a bad network: ``on_post`` decides what
becomes of each batch, and a batch that it leaves PENDING is copied when the test says so (`complete`), late,
in part or never. No thread, no time and no randomness is involved.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

from kvplan.errors import DescriptorError, NotRegisteredError, PeerGoneError, TransportError
from kvplan.transport.base import Batch, Direction, Handle, MemoryRange, State
from kvplan.transport.checked import CheckedTransport, finished

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PREFIX = b"kvplan-memory-1:"
_OPEN: WeakValueDictionary[bytes, MemoryTransport] = WeakValueDictionary()
_OPEN_LOCK = threading.Lock()


class MemoryHandle(Handle):
    """A batch that the memory transport holds back, or has copied."""

    __slots__ = ("batch",)

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch.peer, batch.total_bytes)
        self.batch = batch


class MemoryTransport(CheckedTransport):
    """Copies between addresses of this process.

    ``on_post`` is called with each batch before any byte moves. It returns None or ``State.DONE`` to copy at
    once, ``State.PENDING`` to hold the batch until `complete`, ``State.FAILED`` to fail it without copying; or
    it raises a TransportError, which ``post`` lets through.

    >>> transport = MemoryTransport(on_post=lambda batch: State.PENDING if len(batch) > 1 else None)
    >>> transport.close()
    """

    name: ClassVar[str] = "memory"

    def __init__(self, *, on_post: Callable[[Batch], State | None] | None = None) -> None:
        super().__init__()
        self._on_post = on_post
        self._key = _PREFIX + secrets.token_hex(16).encode()
        self._remote: dict[str, bytes] = {}
        with _OPEN_LOCK:
            _OPEN[self._key] = self

    def pending(self) -> tuple[MemoryHandle, ...]:
        """The batches that are held back, in no particular order."""
        with self._lock:
            return tuple(h for h in self._pending if isinstance(h, MemoryHandle))

    def complete(
        self,
        handle: Handle,
        state: State = State.DONE,
        *,
        reason: str = "failed by the test",
        num_copied: int | None = None,
    ) -> None:
        """End a held batch: copy its first ``num_copied`` descriptors and say ``state``.

        Without ``num_copied`` all are copied for DONE and none for FAILED or PENDING.
        With ``State.PENDING`` the descriptors are copied and the batch stays in flight: a late write. It may be
        called from any thread, and after ``close``: closing a transport does not stop a real carrier either.
        """
        with self._lock:
            if not isinstance(handle, MemoryHandle) or handle not in self._pending:
                raise DescriptorError(f"{handle!r} is not held back by this transport")
            default = len(handle.batch) if state is State.DONE else 0
            fault = self._copy(handle.batch, default if num_copied is None else num_copied)
            if fault:
                finished(handle, State.FAILED, fault)
            elif state is not State.PENDING:
                finished(handle, state, reason if state is State.FAILED else "")
            self._settle(handle)

    def _register(self, ranges: Sequence[MemoryRange]) -> None:
        for item in ranges:
            if item.device.kind != "cpu":
                raise NotRegisteredError(f"the memory transport moves host memory only, not {item.device}")

    def _metadata(self) -> bytes:
        return self._key

    def _connect(self, peer: str, metadata: bytes) -> None:
        if not metadata.startswith(_PREFIX):
            raise TransportError(f"metadata of peer {peer!r} is not of the memory transport", peer=peer)
        if _find_open(metadata) is None:
            raise PeerGoneError(f"peer {peer!r} is not open in this process", peer=peer)
        self._remote[peer] = metadata

    def _disconnect(self, peer: str) -> None:
        self._remote.pop(peer, None)

    def _post(self, batch: Batch) -> Handle:
        remote = _find_open(self._remote[batch.peer])
        if remote is None:
            raise PeerGoneError(f"peer {batch.peer!r} has closed its transport", peer=batch.peer)
        verdict = self._on_post(batch) if self._on_post else None
        handle = MemoryHandle(batch)
        if verdict is State.PENDING:
            return handle
        if verdict is State.FAILED:
            return finished(handle, State.FAILED, "failed by on_post")
        fault = self._copy(batch, len(batch))
        return finished(handle, State.FAILED, fault) if fault else finished(handle, State.DONE)

    def _poll(self, handle: Handle) -> None:
        """Do nothing: only `complete` ends a batch that is held back."""

    def _close(self) -> None:
        with _OPEN_LOCK:
            _OPEN.pop(self._key, None)

    def _copy(self, batch: Batch, count: int) -> str:
        """Copy the first ``count`` descriptors; return why that was not possible, or nothing."""
        remote = _find_open(self._remote.get(batch.peer, b""))
        if remote is None:
            return f"peer {batch.peer!r} has closed its transport"
        try:
            remote._ranges.check("remote", batch.peer, batch.remote_device, batch.remote_address, batch.num_bytes)  # noqa: SLF001 - same class
        except NotRegisteredError as error:
            return str(error)
        local, far, sizes = (a[:count].tolist() for a in (batch.local_address, batch.remote_address, batch.num_bytes))
        to, source = (local, far) if batch.direction is Direction.READ else (far, local)
        for destination, origin, num_bytes in zip(to, source, sizes, strict=True):
            ctypes.memmove(destination, origin, num_bytes)
        return ""


def _find_open(key: bytes) -> MemoryTransport | None:
    with _OPEN_LOCK:
        return _OPEN.get(key)
