"""What a bench reads from: processes of this machine, or a live engine's cache. Connects; measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.cli.bench_measure import FRESH_SEED, Endpoint, on_one_device
from kvplan.errors import UnsupportedError
from kvplan.testing.processes import PeerProcess, ProcessError
from kvplan.transport import Device, MemoryRange, create

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from kvplan.cli.live import LiveEngine

TRANSPORTS = ("nixl", "cma")
"""What is measured between two processes of this machine, as far as it is installed."""


def fresh_endpoints(names: Sequence[str], num_bytes: int, stack: ExitStack) -> dict[str, Endpoint]:
    """Return one endpoint per transport, each a new process. What is not installed is left out, unless it is named."""
    found, missing = {}, []
    for name in names or TRANSPORTS:
        try:
            found[name] = _fresh(name, num_bytes, stack)
        except UnsupportedError as error:
            if names:
                raise
            missing.append(str(error))
    if not found:
        raise UnsupportedError("; ".join(missing))
    return found


def live_endpoint(target: str, engine: LiveEngine, stack: ExitStack) -> dict[str, Endpoint]:
    """Return an endpoint for the first rank of a live engine."""
    card, rank = engine.hello.ranks[0], engine.layout.ranks[0]
    _refuse_memory(card.transport)
    regions = [MemoryRange(region.base, region.num_bytes, Device.parse(region.device)) for region in rank.regions]
    ranges = on_one_device(regions)
    carrier = stack.enter_context(create(card.transport))
    carrier.connect("peer/0", card.metadata)
    origin = f"this host from rank 0 of {engine.layout.engine_id} at {target} ({ranges[0].device})"
    return {card.transport: Endpoint(carrier, "peer/0", ranges, origin)}


def _fresh(name: str, num_bytes: int, stack: ExitStack) -> Endpoint:
    _refuse_memory(name)
    carrier = stack.enter_context(create(name))
    try:
        peer = stack.enter_context(PeerProcess(name, sizes=(num_bytes,), seed=FRESH_SEED))
    except ProcessError as error:
        raise UnsupportedError(f"transport {name!r}: {error}") from None
    carrier.connect("peer/0", peer.metadata)
    return Endpoint(carrier, "peer/0", peer.regions, "two processes on one host", fresh=True)


def _refuse_memory(name: str) -> None:
    if name == "memory":
        raise UnsupportedError("transport 'memory' stays inside one process; there is nothing to measure")
