"""Measuring: batches of equal runs at random places of a peer's memory, and of local scatters. No output, no fit.

Runs lie apart on both sides, so that nothing can be merged; each batch is timed from its post to its arrival, by a
thread that looks often. Bytes of a fresh endpoint are compared before a figure is believed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvplan.cli.calibration import Sample
from kvplan.errors import TransportError
from kvplan.testing.processes import memory_range, pattern
from kvplan.transport import Batch, Device, State
from kvplan.transport.local import copy_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvplan.transport import MemoryRange, Transport

    UInts = NDArray[np.uint64]

LOOK_S = 20e-6
"""Pause between two looks at a transfer."""
PATIENCE_S = 60.0
"""A batch that takes longer ends the measurement."""
MAX_RUNS = 16384
"""Most runs of one batch: of short runs so many say as much as more."""
FRESH_SEED = 1
"""Of the pattern that a fresh endpoint's memory holds."""


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """A connected transport, and memory of its peer that may be read."""

    transport: Transport
    peer: str
    ranges: tuple[MemoryRange, ...]
    """The peer's."""
    origin: str
    """What is measured, for a person."""
    fresh: bool = False
    """Whether the memory is one range that holds ``pattern(FRESH_SEED, ...)``."""
    kept: list[NDArray[np.uint8]] = field(default_factory=list)
    """Memory of ours that is registered: it must stay as long as the transport is open."""

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return registered memory of ours, at least so long; the same again where that is long enough."""
        for held in self.kept:
            if held.nbytes >= num_bytes:
                return held
        return self.new_buffer(num_bytes)

    def new_buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return registered memory of ours that nobody else uses."""
        fresh = np.zeros(num_bytes, np.uint8)
        self.transport.register([memory_range(fresh)])
        self.kept.append(fresh)
        return fresh


@dataclass(frozen=True, slots=True)
class Setting:
    """One batch to measure."""

    run_bytes: int
    num_runs: int


def settings(run_sizes: Sequence[int], num_bytes: int) -> list[Setting]:
    """Return the batches to measure: each size with about ``num_bytes``, and alone, which shows what a post costs."""
    found = [Setting(size, max(1, min(MAX_RUNS, num_bytes // size))) for size in run_sizes]
    return [*found, *(Setting(size, 1) for size in (min(run_sizes), max(run_sizes)))]


def longest_run(ranges: Sequence[MemoryRange]) -> int:
    """Return how long a run may be."""
    return max(item.num_bytes for item in ranges)


def measured(
    endpoint: Endpoint, local: NDArray[np.uint8], setting: Setting, rounds: int, tick: Callable[[], None]
) -> Sample:
    """Return the median of some rounds, after one that is not counted. Raises ``TransportError``."""
    rng = np.random.default_rng(7)
    taken = []
    for number in range(rounds + 1):
        ours, theirs = _places(rng, endpoint, local, setting)
        length = np.full(setting.num_runs, setting.run_bytes, np.uint64)
        batch = Batch(endpoint.peer, ours, theirs, length, remote_device=endpoint.ranges[0].device)
        seconds = timed(endpoint.transport, batch)
        if number:
            taken.append(seconds)
        elif endpoint.fresh:
            _compare(endpoint, local, ours, theirs, setting.run_bytes)
        tick()
    return Sample(setting.run_bytes, setting.num_runs, statistics.median(taken))


def measured_scatter(setting: Setting, rounds: int, tick: Callable[[], None]) -> Sample:
    """Return the median of some local copies from a packed area into blocks of 16 runs in random order."""
    run, count = setting.run_bytes, setting.num_runs
    packed, blocks = np.ones(run * count, np.uint8), np.zeros(2 * run * (count + 16), np.uint8)
    at = np.arange(count, dtype=np.uint64)
    order = np.random.default_rng(7).permutation(-(-count // 16)).astype(np.uint64)
    source = np.uint64(packed.ctypes.data) + at * np.uint64(run)
    place = order[at // np.uint64(16)] * np.uint64(16) + at % np.uint64(16)
    target = np.uint64(blocks.ctypes.data) + place * np.uint64(2 * run)
    length = np.full(count, run, np.uint64)
    taken = []
    for _ in range(rounds + 1):
        began_at = time.perf_counter()
        copy_runs(source, target, length)
        taken.append(time.perf_counter() - began_at)
        tick()
    return Sample(run, count, statistics.median(taken[1:]))


def timed(transport: Transport, batch: Batch) -> float:
    """Return the seconds from a batch's post to its arrival. Raises ``TransportError`` when it does not arrive."""
    began_at = time.perf_counter()
    wait_for(transport, [batch])
    return time.perf_counter() - began_at


def wait_for(transport: Transport, batches: Sequence[Batch]) -> None:
    """Post batches, and return when all have arrived. Raises ``TransportError`` when one does not."""
    ends_at = time.perf_counter() + PATIENCE_S
    for handle in [transport.post(batch) for batch in batches]:
        while transport.poll(handle).state is State.PENDING:
            if time.perf_counter() > ends_at:
                text = f"a batch of {handle.num_bytes} bytes took longer than {PATIENCE_S:g} s"
                raise TransportError(text, peer=handle.peer)
            time.sleep(LOOK_S)
        if handle.progress.state is not State.DONE:
            raise TransportError(handle.progress.reason, peer=handle.peer)


def on_one_device(ranges: Sequence[MemoryRange]) -> tuple[MemoryRange, ...]:
    """Return the ranges of the device that holds most of them."""
    held: dict[Device, list[MemoryRange]] = {}
    for item in ranges:
        held.setdefault(item.device, []).append(item)
    return tuple(max(held.values(), key=lambda own: sum(item.num_bytes for item in own)))


def _places(
    rng: np.random.Generator, endpoint: Endpoint, local: NDArray[np.uint8], setting: Setting
) -> tuple[UInts, UInts]:
    """Return local addresses, two run lengths apart in random order, and random places in the peer's memory."""
    run, count = setting.run_bytes, setting.num_runs
    ours = np.uint64(local.ctypes.data) + rng.permutation(count).astype(np.uint64) * np.uint64(2 * run)
    fitting = [item for item in endpoint.ranges if item.num_bytes >= run]
    which = rng.integers(0, len(fitting), count)
    base = np.array([item.address for item in fitting], np.uint64)[which]
    slots = np.array([max(1, item.num_bytes // (2 * run)) for item in fitting], np.int64)[which]
    offset = (rng.random(count) * slots).astype(np.uint64) * np.uint64(2 * run)
    return ours, base + offset


def _compare(endpoint: Endpoint, local: NDArray[np.uint8], ours: UInts, theirs: UInts, run: int) -> None:
    """Refuse figures for wrong bytes."""
    held = endpoint.ranges[0]
    expected = pattern(FRESH_SEED, held.num_bytes)
    here, there = ours - np.uint64(local.ctypes.data), theirs - np.uint64(held.address)
    for to, origin in zip(here.tolist(), there.tolist(), strict=True):
        if not np.array_equal(local[to : to + run], expected[origin : origin + run]):
            raise TransportError(f"wrong bytes arrived at offset {to}", peer=endpoint.peer)
