"""Engines without a model, in two processes: real memory, front desk, rank sessions. No figures.

`Prefill` is the child's side, `Pair` the parent's: it starts the child, holds decode's ranks, and reads requests. What
crosses between the two for the benchmark's own purposes are JSON lines on pipes.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvplan.layouts import AttentionSpec, CacheGeometry, EngineSpec, Parallel, engine_layout
from kvplan.planner import BlockTable, EngineLayout
from kvplan.session import FrontDesk, Identity, Offer, RankSession, ReadRequest, RemoteRef, SessionConfig
from kvplan.transport import MemoryRange, create

COMPATIBILITY = {"model": "bench"}
PATIENCE_S = 120.0
PAGE = 4096


@dataclass(frozen=True)
class Case:
    """Two engines of one model, and the request's share of the cache."""

    name: str
    layers: int
    heads: int
    tokens: int
    source: dict = field(default_factory=dict)
    """Knobs of prefill's `CacheGeometry`."""
    destination: dict = field(default_factory=dict)
    tp: tuple = (1, 1)
    head_dim: int = 128

    def spec(self, side):
        knobs, tp = (self.source, self.tp[0]) if side == "source" else (self.destination, self.tp[1])
        layers = tuple(
            AttentionSpec(name=f"model.layers.{i}.attn", num_kv_heads=self.heads, head_dim=self.head_dim)
            for i in range(self.layers)
        )
        cache = CacheGeometry(num_blocks=self.num_blocks(side), **knobs)
        name = "bench-prefill" if side == "source" else "bench-decode"
        return EngineSpec(engine_id=name, layers=layers, num_layers=self.layers, parallel=Parallel(tp=tp), cache=cache)

    def block_size(self, side):
        return (self.source if side == "source" else self.destination).get("block_size", 16)

    def num_blocks(self, side):
        """Blocks of each region: twice what the request needs, so that its blocks can lie apart."""
        return 2 * -(-self.tokens // self.block_size(side)) + 2

    def ids(self, side, order, seed):
        """Return the request's block ids in table order, int64.

        ``runs on``: one after the other. ``shuffled``: the same, in random order, equal on both sides. ``by 8``: eight
        after the other, then elsewhere. ``random``: anywhere, so that hardly any block follows another.
        """
        count, room = -(-self.tokens // self.block_size(side)), self.num_blocks(side)
        rng = np.random.default_rng(seed)
        if order == "runs on":
            return np.arange(count, dtype=np.int64) + 1
        if order == "shuffled":
            return rng.permutation(count).astype(np.int64) + 1
        rng = np.random.default_rng(seed + (side == "source"))
        if order == "by 8":
            groups = rng.permutation(room // 8)[: -(-count // 8)]
            return (groups[:, None] * 8 + np.arange(8)).reshape(-1)[:count].astype(np.int64)
        # Every other block at most, so that none follows another by chance.
        return (rng.permutation(room // 2)[:count] * 2 + rng.integers(0, 2)).astype(np.int64)


def allocate(num_bytes):
    """Return fresh private memory on small pages, as an engine on a CPU has it."""
    area = mmap.mmap(-1, -(-num_bytes // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(area, np.uint8)[:num_bytes]


def placed(layout, *, fill=None):
    """Return the layout at real addresses, and its memory, rank by rank and region by region."""
    ranks, memory = [], []
    for index, rank in enumerate(layout.ranks):
        held = [allocate(region.num_bytes) for region in rank.regions]
        for number, area in enumerate(held):
            area[:] = 0 if fill is None else content(fill, index, number, len(area))
        regions = tuple(
            dataclasses.replace(region, base=area.ctypes.data) for region, area in zip(rank.regions, held, strict=True)
        )
        ranks.append(dataclasses.replace(rank, regions=regions))
        memory.append(held)
    return EngineLayout(layout.engine_id, tuple(ranks)), memory


def content(seed, rank, region, num_bytes):
    """Return the bytes of one region of prefill."""
    return np.random.default_rng([seed, rank, region]).integers(0, 256, num_bytes, dtype=np.uint8)


class Ranks:
    """All ranks of one engine in this process, each with transport and session."""

    def __init__(self, engine_id, layout, transport, config):
        self.layout = EngineLayout(engine_id, layout.ranks)
        self.sessions = []
        for index, rank in enumerate(layout.ranks):
            carrier = create(transport)
            carrier.register([MemoryRange(r.base, r.num_bytes) for r in rank.regions])
            identity = Identity(engine_id, index, len(layout.ranks), COMPATIBILITY)
            self.sessions.append(RankSession(identity=identity, layout=rank, transport=carrier, config=config))
        self.desk = FrontDesk(host="127.0.0.1", port=0, config=config)
        self.desk.publish(engine_id, COMPATIBILITY, [session.hello() for session in self.sessions])
        self.desk.start()
        for session in self.sessions:
            session.set_front_desk("127.0.0.1", self.desk.port)
            session.start()

    def close(self):
        for session in self.sessions:
            session.close(1.0)
        self.desk.close()


class Child:
    """A process that answers JSON lines."""

    def __init__(self, module, order):
        ours, theirs = os.pipe()
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        program = f"import sys; from {module} import serve; sys.exit(serve(int(sys.argv[1])))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs)], stdin=subprocess.PIPE, stdout=sys.stderr.fileno(),
            pass_fds=(theirs,), env=env,
        )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(ours, "rb")
        self.hello = self.ask(order)

    def ask(self, order):
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"the second process ended with {self.process.wait()}; its error stands above")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve_lines(answers, handle):
    """Answer each line of standard input by ``handle(order)``, until it ends."""
    with os.fdopen(answers, "wb") as out:
        for line in sys.stdin:
            out.write(json.dumps(handle(json.loads(line))).encode() + b"\n")
            out.flush()


class Prefill:
    """The child: prefill's ranks, over each transport, and agents as vLLM's connector has them."""

    def __init__(self):
        self.engines = {}

    def handle(self, order):
        if "case" in order:
            return self._start(order)
        tables = tuple(BlockTable(first, tuple(ids)) for first, ids in order["tables"])
        for request_id in order["requests"]:
            offer = Offer(request_id, "g", tables, order["tokens"], lease_s=PATIENCE_S)
            for session in self.engines[order["transport"]].sessions:
                session.offer(offer)
        return {}

    def _start(self, order):
        case = Case(**{**order["case"], "tp": tuple(order["case"]["tp"])})
        layout, self.memory = placed(engine_layout(case.spec("source")), fill=order["seed"])
        hello = {
            "regions": [[[r.base, r.num_blocks, r.block_stride_bytes] for r in rank.regions] for rank in layout.ranks]
        }
        hello["desks"], hello["agents"] = {}, []
        for transport in order["transports"]:
            engine_id = f"prefill-{transport}-{uuid.uuid4().hex[:8]}"
            self.engines[transport] = Ranks(engine_id, layout, transport, SessionConfig(**order["config"]))
            hello["desks"][transport] = [engine_id, self.engines[transport].desk.port]
        if order["peer"]:
            from lab.peer import make_agent

            self.agents = []
            for index, rank in enumerate(layout.ranks):
                agent = make_agent(f"peer-prefill-{index}-{uuid.uuid4().hex[:8]}")
                rows = [(r.base, r.num_bytes, 0, "") for r in rank.regions]
                agent.register_memory(agent.get_reg_descs(rows, "DRAM"), backends=["UCX"])
                self.agents.append(agent)
                hello["agents"].append(agent.get_agent_metadata().hex())
        return hello


def serve(answers):
    """Run as the child."""
    prefill = Prefill()
    serve_lines(answers, prefill.handle)
    for engine in prefill.engines.values():
        engine.close()
    return 0


class Pair:
    """Prefill in another process, decode's memory and ranks here."""

    def __init__(self, case, *, transports=("nixl",), peer=False, config=None, ranks=None, seed=1):
        self.case, self.seed = case, seed
        options = dict(config or {})
        order = {"case": dataclasses.asdict(case), "transports": list(transports), "peer": peer, "config": options,
                 "seed": seed}  # fmt: skip
        self.child = Child("lab.engines", order)
        self.layout, self.memory = placed(engine_layout(case.spec("destination")))
        self.engines = {
            name: Ranks(f"decode-{name}-{uuid.uuid4().hex[:8]}", self.layout, name, SessionConfig(**options))
            for name in transports
        }
        self.ranks = tuple(range(len(self.layout.ranks))) if ranks is None else ranks
        """Ranks of decode that read."""
        self._number = 0

    def source_layout(self):
        """Return prefill's layout at the child's addresses."""
        layout = engine_layout(self.case.spec("source"))
        ranks = [
            dataclasses.replace(rank, regions=tuple(
                dataclasses.replace(region, base=base) for region, (base, _, _) in zip(rank.regions, held, strict=True)
            ))
            for rank, held in zip(layout.ranks, self.child.hello["regions"], strict=True)
        ]  # fmt: skip
        return EngineLayout(layout.engine_id, tuple(ranks))

    def offer(self, transport, tables, count=1):
        """Let prefill offer so many requests with the same blocks; return their references."""
        names = [f"r{self._number + i}" for i in range(count)]
        self._number += count
        rows = [(table.first_token, [int(x) for x in table.ids()]) for table in tables]
        order = {"transport": transport, "requests": names, "tables": rows, "tokens": self.case.tokens}
        self.child.ask(order)
        engine_id, port = self.child.hello["desks"][transport]
        return [RemoteRef(engine_id, "127.0.0.1", port, name, "g", tables, self.case.tokens) for name in names]

    def read(self, transport, remotes, tables, *, pause_s=3e-4):
        """Read references with every reading rank; return the seconds from the first call to the last report."""
        sessions = [self.engines[transport].sessions[rank] for rank in self.ranks]
        waiting = {(session, remote.request_id) for session in sessions for remote in remotes}
        began_at = time.perf_counter()
        for remote in remotes:
            for session in sessions:
                session.read(ReadRequest(remote.request_id, remote, tables))
        while waiting:
            for session in sessions:
                results = session.take_results()
                if results.failed:
                    raise SystemExit(f"read failed: {results.failed}")
                waiting -= {(session, name) for name in results.received}
            if time.perf_counter() - began_at > PATIENCE_S:
                raise SystemExit("a read takes too long")
            time.sleep(pause_s)
        return time.perf_counter() - began_at

    def wipe(self):
        for held in self.memory:
            for area in held:
                area[:] = 0

    def close(self):
        for engine in self.engines.values():
            engine.close()
        self.child.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
