"""How fast is each carrier at each run size, against one thread of memcpy? One question, one table, one run.

    python benchmarks/bench_transport.py [--mib 64] [--rounds 5] [--sizes 4,16,64,256,1024]

Two processes on this host. Source runs lie apart by twice their length and are read in random order into equally
scattered places, so nothing can be merged. Every round measures every carrier once, in turn; a figure is the
median over the rounds, and ratios are of figures of the same run. Bytes are compared before anything is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from kvplan.errors import UnsupportedError
from kvplan.testing.processes import PeerProcess, memory_range, pattern
from kvplan.transport import Batch, State, Transport, create

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Carrier:
    """One connected transport and where its peer's bytes lie."""

    name: str
    transport: Transport
    base: int


def scattered(base_local, base_remote, run, count, seed=0):
    """Return the batch's arrays: ``count`` runs in random order, two run lengths apart on both sides."""
    rng = np.random.default_rng(seed)
    at = [
        base + rng.permutation(count).astype(np.uint64) * np.uint64(2 * run)
        for base in map(np.uint64, (base_local, base_remote))
    ]
    return at[0], at[1], np.full(count, run, dtype=np.uint64)


def time_carrier(carrier, arrays):
    """Return seconds from making the batch to DONE."""
    begun = time.perf_counter()
    handle = carrier.transport.post(Batch("p", *arrays))
    while carrier.transport.poll(handle).state is State.PENDING:
        time.sleep(0.0001)
    elapsed = time.perf_counter() - begun
    if handle.progress.state is not State.DONE:
        raise SystemExit(f"{carrier.name}: {handle.progress.reason}")
    return elapsed


def time_memcpy(arrays):
    """Return seconds of one thread copying the same runs inside this process."""
    rows = list(zip(*(a.tolist() for a in arrays), strict=True))
    move = ctypes.memmove
    begun = time.perf_counter()
    for to, origin, num_bytes in rows:
        move(to, origin, num_bytes)
    return time.perf_counter() - begun


def check(name, local, source, arrays, base_remote):
    """Refuse figures for wrong bytes."""
    to, origin, num_bytes = (a.tolist() for a in arrays)
    for a, b, n in zip(to, origin, num_bytes, strict=True):
        x, y = a - local.ctypes.data, b - base_remote
        if not np.array_equal(local[x : x + n], source[y : y + n]):
            raise SystemExit(f"{name}: wrong bytes at {x}")


def connect(name, size, local, stack):
    """Return a connected carrier, or None when its package is not installed."""
    try:
        transport = stack.enter_context(create(name))
    except UnsupportedError as error:
        Console().print(f"[yellow]{error}")
        return None
    peer = stack.enter_context(PeerProcess(name, sizes=(size,)))
    transport.register([memory_range(local)])
    transport.connect("p", peer.metadata)
    return Carrier(name, transport, peer.regions[0].address)


def measure(carriers, local, source, run, count, rounds):
    """Return the median seconds of memcpy and of each carrier, by name."""
    seconds = {name: [] for name in ("memcpy", *(c.name for c in carriers))}
    for number in range(rounds + 1):
        arrays = scattered(local.ctypes.data, source.ctypes.data, run, count)
        taken = {"memcpy": time_memcpy(arrays)}
        for carrier in carriers:
            arrays = scattered(local.ctypes.data, carrier.base, run, count)
            local[:] = 0
            taken[carrier.name] = time_carrier(carrier, arrays)
            if number == 0:
                check(carrier.name, local, source, arrays, carrier.base)
        if number:  # the first round wires up and touches pages
            for name, value in taken.items():
                seconds[name].append(value)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="MiB moved per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="4,16,64,256,1024", help="run sizes in KiB")
    options = parser.parse_args()
    size = 2 * options.mib * MIB
    local, source = np.zeros(size, np.uint8), pattern(1, size)
    with ExitStack() as stack:
        carriers = [c for c in (connect(n, size, local, stack) for n in ("nixl", "cma")) if c]
        table = Table(title=f"reading {options.mib} MiB in scattered runs, median of {options.rounds}")
        table.add_column("run")
        table.add_column("runs", justify="right")
        names = ["memcpy", *(c.name for c in carriers)]
        for name in names:
            table.add_column(f"{name}\nGB/s", justify="right")
        for name in names[1:]:
            table.add_column(f"{name}\nus/run", justify="right")
        for name in names[1:]:
            table.add_column(f"{name} /\nmemcpy", justify="right")
        if len(carriers) == 2:
            table.add_column("cma /\nnixl", justify="right")
        for run in (int(s) * KIB for s in options.sizes.split(",")):
            count = options.mib * MIB // run
            taken = measure(carriers, local, source, run, count, options.rounds)
            row = [f"{size_text(run)}", str(count)]
            row += [f"{count * run / taken[n] / 1e9:.2f}" for n in names]
            row += [f"{taken[n] / count * 1e6:.2f}" for n in names[1:]]
            row += [f"{taken['memcpy'] / taken[n]:.2f}" for n in names[1:]]
            if len(carriers) == 2:
                row.append(f"{taken['nixl'] / taken['cma']:.2f}")
            table.add_row(*row)
    Console(width=120).print(table)
    Console(width=120).print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")


def size_text(num_bytes):
    """Return a size as a person writes it."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


if __name__ == "__main__":
    main()
