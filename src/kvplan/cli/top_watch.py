"""Asks engines how they are: front desks first, then every rank that they name. Values out; no output."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvplan.cli.live import TIMEOUT_S, live_address, unexpected
from kvplan.cli.top_model import Sample
from kvplan.errors import UnavailableError, WireError
from kvplan.wire.addresses import check_advertised, parse_address
from kvplan.wire.asking import Asker
from kvplan.wire.status import Status, StatusRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from kvplan.wire.addresses import Address
    from kvplan.wire.messages import Message


class Watch:
    """Connections to some engines, kept from one sample to the next. A context manager."""

    def __init__(self, targets: Sequence[str], *, key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._desks = {target: live_address(target) for target in targets}
        self._timeout_s = timeout_s
        self._asker = Asker(key=key)

    def sample(self) -> list[Sample]:
        """Return what each engine says now; one that cannot be asked says why."""
        answers = self._asker.ask_all(dict.fromkeys(self._desks.values(), StatusRequest()), timeout_s=self._timeout_s)
        desks = {address: _status(address, answer) for address, answer in answers.items()}
        ranks = {address: _ranks(address, desk) for address, desk in desks.items() if isinstance(desk, Status)}
        wanted = dict.fromkeys((rank for found, _ in ranks.values() for rank in found), StatusRequest())
        said = self._asker.ask_all(wanted, timeout_s=self._timeout_s)
        now = time.monotonic()
        return [self._sample(target, at, desks[at], ranks, said, now) for target, at in self._desks.items()]

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._asker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _sample(
        target: str,
        address: Address,
        desk: Status | UnavailableError,
        ranks: Mapping[Address, tuple[list[Address], list[str]]],
        said: Mapping[Address, Message | UnavailableError],
        now: float,
    ) -> Sample:
        if isinstance(desk, UnavailableError):
            return Sample(target, now, errors=(str(desk),))
        addresses, errors = ranks[address]
        answers = [_status(rank, said[rank]) for rank in addresses]
        good = tuple(sorted((answer for answer in answers if isinstance(answer, Status)), key=lambda one: one.rank))
        bad = [str(answer) for answer in answers if isinstance(answer, UnavailableError)]
        return Sample(target, now, desk, good, (*errors, *bad))


def _status(address: Address, answer: Message | UnavailableError) -> Status | UnavailableError:
    if isinstance(answer, UnavailableError | Status):
        return answer
    return unexpected(address, answer)


def _ranks(desk: Address, status: Status) -> tuple[list[Address], list[str]]:
    """Return the control addresses that can be asked from here, and why others cannot."""
    found, errors = [], []
    for card in status.ranks:
        try:
            address = parse_address(card.control_address)
            check_advertised(address, reached=desk.host)
        except WireError as error:
            errors.append(str(error))
        else:
            found.append(address)
    return found, errors
