"""A transport whose bytes can be made to arrive wrong, around any other transport. No rule says when; callers do.

It is what `verify` is tested with: a carrier that says DONE and has not told the truth.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.transport.base import Direction, State, Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.transport.base import Batch, Handle, MemoryRange, Progress


class _Wrong(NamedTuple):
    """Bytes of a peer that arrive wrong."""

    peer: str
    address: int
    num_bytes: int


class CorruptingTransport(Transport):
    """Another transport, except that bytes read from the places named by ``corrupt`` arrive inverted.

    The places are the peer's, so that it does not matter where they go: into blocks, or through a staging area.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._wrong: list[_Wrong] = []
        self._batches: dict[Handle, Batch] = {}
        self.num_corrupted = 0
        """Bytes that have arrived wrong so far."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """The other transport's: peers cannot tell."""
        return self._inner.name

    def corrupt(self, peer: str, address: int, num_bytes: int = 1) -> None:
        """Let bytes that are read from a place of a peer arrive wrong, from the next batch on."""
        self._wrong.append(_Wrong(peer, address, num_bytes))

    def heal(self) -> None:
        """Let everything arrive right again."""
        self._wrong.clear()

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """See `Transport.register`."""
        self._inner.register(ranges)

    def metadata(self) -> bytes:
        """See `Transport.metadata`."""
        return self._inner.metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        """See `Transport.connect`."""
        self._inner.connect(peer, metadata)

    def disconnect(self, peer: str) -> None:
        """See `Transport.disconnect`."""
        self._inner.disconnect(peer)

    def post(self, batch: Batch) -> Handle:
        """See `Transport.post`."""
        handle = self._inner.post(batch)
        if batch.direction is Direction.READ and any(wrong.peer == batch.peer for wrong in self._wrong):
            self._batches[handle] = batch
        return handle

    def poll(self, handle: Handle) -> Progress:
        """See `Transport.poll`; a batch is spoilt just before it is said to be DONE."""
        progress = self._inner.poll(handle)
        if progress.state is not State.PENDING:
            batch = self._batches.pop(handle, None)
            if batch is not None and progress.state is State.DONE:
                self._spoil(batch)
        return progress

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def _spoil(self, batch: Batch) -> None:
        remote, local, size = (a.astype(np.int64) for a in (batch.remote_address, batch.local_address, batch.num_bytes))
        for wrong in self._wrong:
            first = np.maximum(remote, wrong.address)
            count = np.minimum(remote + size, wrong.address + wrong.num_bytes) - first
            for i in np.flatnonzero(count > 0) if wrong.peer == batch.peer else ():
                at = int(local[i] + first[i] - remote[i])
                place = (ctypes.c_uint8 * int(count[i])).from_address(at)
                place[:] = [byte ^ 0xFF for byte in place]
                self.num_corrupted += int(count[i])
