"""Pieces that wait to be posted, peer by peer in turns. Posts nothing, and knows no slots.

A peer's pieces keep their order among the staged ones and among the straight ones. Staged pieces go first while a slot
is free: their scatter then runs beside the reads that follow.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplan.session.reads import Piece


class _Turns:
    """One queue per peer; each take is the next peer's."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Piece]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, piece: Piece) -> None:
        self._queues.setdefault(piece.peer, deque()).append(piece)

    def take(self) -> Piece:
        peer = next(iter(self._queues))
        queue = self._queues.pop(peer)
        piece = queue.popleft()
        if queue:
            self._queues[peer] = queue  # at the end: the others come first now
        return piece


class PieceQueues:
    """Every piece that waits."""

    def __init__(self) -> None:
        self._straight = _Turns()
        self._staged = _Turns()

    def has_any(self, *, staged: bool) -> bool:
        """Return whether a piece could be taken; ``staged`` says whether a staged one may."""
        return bool(self._straight) or (staged and bool(self._staged))

    def add(self, piece: Piece) -> None:
        """Put a piece at the end of its peer's queue."""
        (self._straight if piece.scatter is None else self._staged).add(piece)

    def take(self, *, staged: bool) -> Piece:
        """Return the next piece; there must be one."""
        return (self._staged if staged and self._staged else self._straight).take()
