"""Leases: until when a key is kept. Times come in as arguments, from one monotonic clock; nothing here waits.

A heap of (deadline, key) finds what has expired; entries that a renewal or an end made stale are skipped when they
surface, and swept when they outnumber the live ones. So order of insertion does not matter, and every operation
is O(log n).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

K = TypeVar("K", bound="Hashable")


class LeaseBook(Generic[K]):
    """Deadlines by key.

    >>> book = LeaseBook[str]()
    >>> book.extend("a", 30.0), book.extend("a", 20.0)
    (30.0, 30.0)
    >>> book.expire(30.0)
    ['a']
    """

    def __init__(self) -> None:
        self._deadlines: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._turn = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: object) -> bool:
        return key in self._deadlines

    def extend(self, key: K, deadline: float) -> float:
        """Move the key's deadline, never to an earlier time, and return it. A new key gets it as it is."""
        held = self._deadlines.get(key)
        if held is not None and held >= deadline:
            return held
        self._deadlines[key] = deadline
        self._turn += 1
        heapq.heappush(self._heap, (deadline, self._turn, key))
        self._sweep()
        return deadline

    def deadline(self, key: K) -> float | None:
        """Return until when the key is kept, or None."""
        return self._deadlines.get(key)

    def end(self, key: K) -> None:
        """Forget a key; does nothing when it is not known."""
        self._deadlines.pop(key, None)

    def expire(self, now: float) -> list[K]:
        """Forget and return every key whose deadline has come, earliest first."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            deadline, _, key = heapq.heappop(self._heap)
            if self._deadlines.get(key) == deadline:
                del self._deadlines[key]
                expired.append(key)
        return expired

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None."""
        while self._heap and self._deadlines.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._deadlines) + 64:
            self._heap = [item for item in self._heap if self._deadlines.get(item[2]) == item[0]]
            heapq.heapify(self._heap)
