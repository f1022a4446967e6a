"""Claims and moves that transport tests are made of; the suite itself lives in `transport_conformance`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.errors import TransportError
from kvplan.transport import Batch, Progress, State, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

BOUND_S = 15.0
"""How long a batch may take to become terminal when its peer is dead."""
POLL_S = 0.0005
"""How long tests sleep between two polls."""


class ConformanceError(AssertionError):
    """A transport does not do what every transport must."""


def expect(fact: object, claim: str) -> None:
    """Raise ConformanceError with ``claim`` unless ``fact`` is true."""
    if not fact:
        raise ConformanceError(claim)


def expect_raises(kind: type[Exception], action: Callable[[], object], *words: str) -> None:
    """Raise ConformanceError unless ``action`` raises ``kind`` with every one of ``words`` in its message."""
    try:
        action()
    except kind as error:
        for word in words:
            expect(word in str(error), f"message lacks {word!r}: {error}")
    else:
        raise ConformanceError(f"{kind.__name__} was not raised")


def move(transport: Transport, batch: Batch, *, bound_s: float = BOUND_S) -> Progress:
    """Post ``batch``, poll until it is terminal and return the last answer; an error of ``post`` counts as FAILED."""
    deadline = time.monotonic() + bound_s
    try:
        handle = transport.post(batch)
    except TransportError as error:
        expect(time.monotonic() < deadline, f"post took more than {bound_s} s to fail")
        return Progress(State.FAILED, str(error))
    while (progress := transport.poll(handle)).state is State.PENDING:
        expect(time.monotonic() < deadline, f"batch is not terminal within {bound_s} s")
        time.sleep(POLL_S)
    expect(transport.poll(handle) == progress, "a terminal answer changed when polled again")
    return progress


def make_batch(peer: str, local: ArrayLike, remote: ArrayLike, num_bytes: ArrayLike, **options: Any) -> Batch:
    """Return ``Batch(...)`` of anything that numpy makes arrays of."""
    return Batch(peer, np.asarray(local), np.asarray(remote), np.asarray(num_bytes), **options)
