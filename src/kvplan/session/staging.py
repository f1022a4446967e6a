"""The staging area: host memory of our own that fine-grained reads pass through. No requests, no plans.

The area is made and registered at its first use, in slots of one batch each. A slot is free again when its
handle is terminal: a late write may hit a slot that waits, never one that has been given to another read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import SessionError
from kvplan.planner import Descriptors
from kvplan.session.config import PAGE_BYTES
from kvplan.transport.base import MemoryRange
from kvplan.transport.local import copy_runs

if TYPE_CHECKING:
    from kvplan.session.config import SessionConfig
    from kvplan.transport.base import Transport


_WRITTEN: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
"""Memory of areas with a slot in use, by address: it outlives a session that was closed with a write outstanding."""


class StagingArea:
    """Slots of host memory."""

    def __init__(self, *, transport: Transport, config: SessionConfig) -> None:
        self._transport = transport
        self._num_slots = config.staging_slots
        self.slot_bytes = config.slot_bytes
        """Size of one slot; 0 when staging is off."""
        self._memory: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._base = 0
        self._free: list[int] = []

    @property
    def has_free(self) -> bool:
        """Whether a slot could be taken."""
        return self.slot_bytes > 0 and (self._memory is None or bool(self._free))

    @property
    def num_bytes(self) -> int:
        """Size of the area; 0 until it is made."""
        return 0 if self._memory is None else self._num_slots * self.slot_bytes

    @property
    def num_used(self) -> int:
        """Slots that hold a batch."""
        return 0 if self._memory is None else self._num_slots - len(self._free)

    def take(self) -> int:
        """Return a free slot, making the area at the first call. Raises ``TransportError`` when that fails."""
        memory = self._memory if self._memory is not None else self._make()
        if not self._free:
            raise SessionError("no staging slot is free")
        _WRITTEN[self._base] = memory
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free a slot that nothing writes into any more."""
        self._free.append(slot)
        if len(self._free) == self._num_slots:
            _WRITTEN.pop(self._base, None)

    def placed(self, slot: int, reads: Descriptors) -> Descriptors:
        """Return reads whose destinations, relative to a slot, are made absolute."""
        return Descriptors(reads.source_address, reads.destination_address + self._start(slot), reads.num_bytes)

    def scatter(self, slot: int, runs: Descriptors) -> None:
        """Copy what lies in a slot to where it belongs; sources are relative to the slot."""
        copy_runs(runs.source_address + self._start(slot), runs.destination_address, runs.num_bytes)

    def _start(self, slot: int) -> np.uint64:
        return np.uint64(self._base + slot * self.slot_bytes)

    def _make(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        size = self._num_slots * self.slot_bytes
        memory = np.zeros(size + PAGE_BYTES, np.uint8)
        base = -(-memory.ctypes.data // PAGE_BYTES) * PAGE_BYTES
        self._transport.register([MemoryRange(base, size)])
        self._memory, self._base, self._free = memory, base, list(range(self._num_slots))
        return memory
