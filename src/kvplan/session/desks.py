"""Desks: whom to ask for a hello, and when again. One question per address, however many want the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplan.session.config import SessionConfig
    from kvplan.wire.addresses import Address


@dataclass(slots=True)
class Desk:
    """One front desk that is being asked."""

    next_at: float = -math.inf
    """When to ask (again)."""
    backoff_s: float = 0.0
    last_answer: str = "no answer"
    """What the last attempt came to, for people."""


class Desks:
    """Every front desk that is being asked, with backoff.

    An attempt that is answered with "not ready", or whose connection is lost, is repeated after a backoff; one that is
    not answered at all, after ``hello_timeout_s``.
    """

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._desks: dict[Address, Desk] = {}

    def __contains__(self, address: object) -> bool:
        return address in self._desks

    def want(self, address: Address) -> None:
        """Ask there until told otherwise; again is the same."""
        self._desks.setdefault(address, Desk(backoff_s=self._config.backoff_s))

    def unwant(self, address: Address) -> None:
        """Ask there no more."""
        self._desks.pop(address, None)

    def due(self, now: float) -> list[Address]:
        """Return the addresses to ask now; each is due again when its time to answer is over."""
        due = [address for address, desk in self._desks.items() if desk.next_at <= now]
        for address in due:
            self._desks[address].next_at = now + self._config.hello_timeout_s
        return due

    def next_due(self) -> float:
        """Return when the next address is due; infinite when none is."""
        return min((desk.next_at for desk in self._desks.values()), default=math.inf)

    def retry(self, address: Address, why: str, now: float) -> None:
        """Note that an attempt came to nothing; ask again after the backoff."""
        desk = self._desks.get(address)
        if desk is not None:
            desk.last_answer = why
            desk.next_at = min(desk.next_at, now + desk.backoff_s)
            desk.backoff_s = min(2 * desk.backoff_s, self._config.backoff_max_s)

    def last_answer(self, address: Address) -> str:
        """Return what the last attempt came to."""
        desk = self._desks.get(address)
        return desk.last_answer if desk else "not asked"
