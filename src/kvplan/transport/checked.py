"""The checks and counts that every carrier needs live here, once; no carrier does.

A carrier extends `CheckedTransport` and gives the hooks: ``_register``, ``_metadata``, ``_connect``,
``_disconnect``, ``_post``, ``_poll`` and ``_close``. In return it is only called with

1. an open transport,
2. a peer that is connected,
3. descriptors whose local bytes lie inside one registered range each, and at least one of them,
4. handles of its own that are still PENDING.

``_disconnect`` is called when the last pending handle of that peer is terminal, never earlier.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

from kvplan.errors import TransportError
from kvplan.transport.base import Batch, Handle, MemoryRange, Progress, State, Transport
from kvplan.transport.ranges import RangeTable

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_METADATA_BYTES = 16 << 20
"""A peer's metadata above this is refused: a range costs some 50 bytes, a rank has at most thousands."""


class CheckedTransport(Transport):
    """Does everything of a transport that is not the carrying."""

    def __init__(self) -> None:
        self._ranges = RangeTable()
        self._peers: dict[str, bytes] = {}
        self._pending: set[Handle] = set()
        self._leaving: set[str] = set()
        self._closed = False
        self._lock = threading.RLock()

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of the peers that are connected."""
        return tuple(self._peers)

    @property
    def num_pending(self) -> int:
        """How many handles may still write."""
        return len(self._pending)

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """See `Transport.register`. A range that is registered already is left as it is."""
        with self._lock:
            self._require_open()
            new = [r for r in dict.fromkeys(ranges) if r not in set(self._ranges)]
            if new:
                self._register(new)
                self._ranges.add(new)

    def metadata(self) -> bytes:
        """See `Transport.metadata`."""
        with self._lock:
            self._require_open()
            return self._metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        """See `Transport.connect`."""
        with self._lock:
            self._require_open()
            if self._peers.get(peer) == metadata:
                return
            if peer in self._peers:
                raise TransportError(f"peer {peer!r} is connected with other metadata; disconnect it first", peer=peer)
            if peer in self._leaving:
                raise TransportError(
                    f"peer {peer!r} still has a batch in flight from before it was disconnected", peer=peer
                )
            if len(metadata) > MAX_METADATA_BYTES:
                raise TransportError(
                    f"metadata of peer {peer!r} has {len(metadata)} bytes; the limit is {MAX_METADATA_BYTES}", peer=peer
                )
            self._connect(peer, metadata)
            self._peers[peer] = metadata

    def disconnect(self, peer: str) -> None:
        """See `Transport.disconnect`. The carrier forgets the peer when its last batch is terminal."""
        with self._lock:
            if self._peers.pop(peer, None) is None:
                return
            self._leaving.add(peer)
            self._dismiss_leaving()

    def post(self, batch: Batch) -> Handle:
        """See `Transport.post`."""
        with self._lock:
            self._require_open()
            if batch.peer not in self._peers:
                known = ", ".join(sorted(self._peers)) or "none"
                raise TransportError(f"peer {batch.peer!r} is not connected; connected: {known}", peer=batch.peer)
            self._ranges.check("local", batch.peer, batch.local_device, batch.local_address, batch.num_bytes)
            if not len(batch):
                return finished(Handle(batch.peer, 0), State.DONE)
            handle = self._post(batch)
            if not handle.is_terminal:
                self._pending.add(handle)
            return handle

    def poll(self, handle: Handle) -> Progress:
        """See `Transport.poll`."""
        with self._lock:
            if handle in self._pending and not self._closed:
                self._poll(handle)
                self._settle(handle)
            return handle.progress

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            if self._closed:
                return
            self._close()
            for handle in tuple(self._pending):
                self._settle(handle)
            self._closed = True
            self._peers.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"the {self.name} transport is closed")

    def _settle(self, handle: Handle) -> None:
        if handle.is_terminal and handle in self._pending:
            self._pending.remove(handle)
            self._dismiss_leaving()

    def _dismiss_leaving(self) -> None:
        busy = Counter(handle.peer for handle in self._pending)
        for peer in [p for p in self._leaving if not busy[p]]:
            self._leaving.remove(peer)
            self._disconnect(peer)

    @abstractmethod
    def _register(self, ranges: Sequence[MemoryRange]) -> None: ...

    @abstractmethod
    def _metadata(self) -> bytes: ...

    @abstractmethod
    def _connect(self, peer: str, metadata: bytes) -> None: ...

    @abstractmethod
    def _disconnect(self, peer: str) -> None: ...

    @abstractmethod
    def _post(self, batch: Batch) -> Handle: ...

    @abstractmethod
    def _poll(self, handle: Handle) -> None:
        """Set ``handle.progress`` when it has become terminal."""

    @abstractmethod
    def _close(self) -> None: ...


def finished(handle: Handle, state: State, reason: str = "") -> Handle:
    """Make ``handle`` terminal, once, and return it."""
    if handle.is_terminal:
        raise RuntimeError(f"{handle!r} is terminal and was finished again")
    handle.progress = Progress(state, reason)
    return handle
