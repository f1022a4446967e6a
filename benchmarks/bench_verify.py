"""What does verifying a read cost, at verify_rate 0 and 1? One question, one table, one run.

    python benchmarks/bench_verify.py [--layers 32] [--tokens 512,4096] [--rounds 5] [--transport cma]

A prefill engine in a process of its own and a decode engine here, TP 1 each, on one host. Each round reads the same
request once at each rate, in turn; a figure is the median over the rounds, from `read` to the result. The digests' own
speed is bytes by the seconds that this side's worker took for them; the producer does the same work at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid

import numpy as np
from rich.console import Console
from rich.table import Table

from kvplan.layouts import AttentionSpec, CacheGeometry, EngineSpec, Parallel, engine_layout
from kvplan.planner import BlockTable, EngineLayout
from kvplan.session import FrontDesk, Identity, Offer, RankSession, ReadRequest, RemoteRef, SessionConfig
from kvplan.transport import MemoryRange, create

HEADS, HEAD_DIM = 8, 128
CASES = {
    "HND 16 -> HND 16": ({"block_size": 16}, {"block_size": 16}),
    "NHD 16 -> HND 64": ({"block_size": 16, "kv_layout": "NHD"}, {"block_size": 64}),
    "TRANSPOSED 32 -> 32": ({"block_size": 32, "kv_layout": "TRANSPOSED"},) * 2,
}


class Rank:
    """One engine of one rank at real memory, with any number of sessions."""

    def __init__(self, name, knobs, layers, tokens, *, seed):
        blocks = -(-tokens // knobs["block_size"]) + 2
        specs = tuple(
            AttentionSpec(name=f"model.layers.{i}.attn", num_kv_heads=HEADS, head_dim=HEAD_DIM) for i in range(layers)
        )
        cache = CacheGeometry(num_blocks=blocks, **knobs)
        made = engine_layout(
            EngineSpec(engine_id=name, layers=specs, num_layers=layers, parallel=Parallel(), cache=cache)
        )
        rng = np.random.default_rng(seed)
        self.memory = [rng.integers(0, 256, region.num_bytes, dtype=np.uint8) for region in made.ranks[0].regions]
        regions = tuple(
            dataclasses.replace(region, base=held.ctypes.data)
            for region, held in zip(made.ranks[0].regions, self.memory, strict=True)
        )
        self.rank = dataclasses.replace(made.ranks[0], regions=regions)
        self.layout = EngineLayout(name, (self.rank,))
        ids = rng.permutation(blocks)[: -(-tokens // knobs["block_size"])]
        self.tables = (BlockTable(0, tuple(ids.tolist())),)

    def session(self, name, transport, config):
        """Return a running session and its front desk."""
        carrier = create(transport)
        carrier.register([MemoryRange(held.ctypes.data, held.nbytes) for held in self.memory])
        session = RankSession(identity=Identity(name, 0, 1, {}), layout=self.rank, transport=carrier, config=config)
        desk = FrontDesk(host="127.0.0.1", port=0, config=config)
        session.set_front_desk("127.0.0.1", desk.port)
        desk.start()
        session.start()
        desk.publish(name, {}, [session.hello()])
        return session, desk


def serve():
    """Be the prefill engine: one order on standard input, one request id a line after it."""
    order = json.loads(sys.stdin.readline())
    rank = Rank("prefill", order["knobs"], order["layers"], order["tokens"], seed=1)
    session, desk = rank.session("prefill", order["transport"], SessionConfig())
    print(json.dumps({"port": desk.port}), file=sys.stderr, flush=True)
    for line in sys.stdin:
        session.offer(Offer(line.strip(), "g", rank.tables, order["tokens"]))
        session.take_results()
    session.close()
    desk.close()


class Prefill:
    """The prefill engine's process."""

    def __init__(self, **order):
        arguments = [sys.executable, __file__, "--serve"]
        self.child = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=sys.stderr.fileno()
        )
        self.say(json.dumps(order))
        self.port = None
        while self.port is None:
            line = self.child.stderr.readline()
            if not line:
                raise SystemExit("the prefill process has ended")
            with contextlib.suppress(ValueError):
                self.port = json.loads(line)["port"]
        self.rank = Rank("prefill", order["knobs"], 1, order["tokens"], seed=1)

    def say(self, line):
        self.child.stdin.write(line.encode() + b"\n")
        self.child.stdin.flush()

    def close(self):
        self.child.stdin.close()
        self.child.wait(10)
        self.child.stderr.close()


def read(session, prefill, decode, tables, tokens):
    """Return the seconds of one read."""
    name = uuid.uuid4().hex
    prefill.say(name)
    remote = RemoteRef("prefill", "127.0.0.1", prefill.port, name, "g", tables, tokens)
    begun = time.perf_counter()
    session.read(ReadRequest(name, remote, decode.tables))
    while not (results := session.take_results()):
        time.sleep(0.0002)
    elapsed = time.perf_counter() - begun
    if name not in results.received:
        raise SystemExit(f"the read failed: {results.failed}")
    return elapsed


def source_tables(knobs, layers, tokens):
    """Return the block tables that the prefill process draws: the same numbers from the same seed."""
    return Rank("prefill", knobs, layers, tokens, seed=1).tables


def measure(knobs, layers, tokens, rounds, transport):
    """Return (bytes, seconds at rate 0, seconds at rate 1, digest seconds of one read here)."""
    prefill = Prefill(knobs=knobs[0], layers=layers, tokens=tokens, transport=transport)
    tables = source_tables(knobs[0], layers, tokens)
    decode = Rank("decode", knobs[1], layers, tokens, seed=2)
    sessions = {
        rate: decode.session(f"decode-{rate}", transport, SessionConfig(verify_rate=rate)) for rate in (0.0, 1.0)
    }
    try:
        seconds = {rate: [] for rate in sessions}
        for number in range(rounds + 1):
            for rate, (session, _) in sessions.items():
                taken = read(session, prefill, decode, tables, tokens)
                if number:  # the first read shakes hands and touches pages
                    seconds[rate].append(taken)
        stats = sessions[1.0][0].stats()
        digest_s = stats["digest_seconds.sum"] / stats["digest_seconds.count"]
    finally:
        for session, desk in sessions.values():
            session.close()
            desk.close()
        prefill.close()
    num_bytes = tokens * layers * 2 * HEADS * HEAD_DIM * 2
    return num_bytes, statistics.median(seconds[0.0]), statistics.median(seconds[1.0]), digest_s


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", default="512,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", default="cma")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    table = Table(title=f"one read, {options.layers} layers of {HEADS} x {HEAD_DIM} bfloat16, over {options.transport}")
    table.add_column("layouts")
    for name in ("tokens", "MB", "rate 0\nms", "rate 1\nms", "added\nms", "digests\nGB/s"):
        table.add_column(name, justify="right")
    for case, knobs in CASES.items():
        for tokens in (int(x) for x in options.tokens.split(",")):
            num_bytes, off, on, digest_s = measure(knobs, options.layers, tokens, options.rounds, options.transport)
            figures = (num_bytes / 1e6, off * 1e3, on * 1e3, (on - off) * 1e3)
            speed = f"{num_bytes / digest_s / 1e9:.2f}"
            table.add_row(case, str(tokens), *(f"{x:.1f}" for x in figures), speed)
    Console(width=120).print(table)
    Console(width=120).print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
