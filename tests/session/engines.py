"""Small engines in this process: real memory, front desk and rank sessions. No vLLM, no models."""

from __future__ import annotations

import dataclasses
import time
from contextlib import contextmanager

from kvplan.planner import BlockTable, EngineLayout
from kvplan.session import FrontDesk, Identity, Offer, RankSession, ReadRequest, RemoteRef, SessionConfig
from kvplan.testing.oracle import UNTOUCHED, Memory, check_moved, write_coordinates
from kvplan.testing.strategies import Shape, engine
from kvplan.transport import MemoryRange
from kvplan.transport.memory import MemoryTransport

TOTAL_HEADS = 4
NUM_BLOCKS = 12
COMPATIBILITY = {"model": "tiny", "dtype": "bfloat16"}

QUICK = SessionConfig(
    lease_s=5.0,
    heartbeat_s=0.2,
    extension_s=1.0,
    lease_margin_s=0.05,
    claim_park_s=0.4,
    claim_timeout_s=2.0,
    handshake_timeout_s=2.0,
    hello_timeout_s=0.6,
    transfer_timeout_s=4.0,
    backoff_s=0.02,
    backoff_max_s=0.1,
    resend_s=0.2,
    close_timeout_s=1.0,
    staging_bytes=1 << 20,
    descriptor_us=1000.0,
)
"""Everything happens soon; the proportions are those of the defaults."""

P_SHAPE = Shape(parallel=2, block_size=4, kernel_block_size=2, order="HND", packing="split")
D_SHAPE = Shape(parallel=3, block_size=6, kernel_block_size=6, order="NHD", packing="packed")
"""Coprime parallel sizes, blocks 4 and 6, other orders and packings: nothing agrees by accident."""

ONE_P, ONE_D = dataclasses.replace(P_SHAPE, parallel=1), dataclasses.replace(D_SHAPE, parallel=1)
"""The same with one rank each, for tests that start many engines."""


def in_memory(layout: EngineLayout) -> tuple[EngineLayout, list[Memory]]:
    """Return the layout at the addresses of freshly allocated memory, and that memory."""
    memories, ranks = [], []
    for rank in layout.ranks:
        memory = Memory(rank)
        regions = tuple(
            dataclasses.replace(region, base=held.ctypes.data)
            for region, held in zip(rank.regions, memory.bytes, strict=True)
        )
        memory.rank = dataclasses.replace(rank, regions=regions)
        memories.append(memory)
        ranks.append(memory.rank)
    return EngineLayout(layout.engine_id, tuple(ranks)), memories


def wait_until(condition, bound_s=10.0, what="condition"):
    """Poll until a condition holds; returns its value."""
    ends_at = time.monotonic() + bound_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > ends_at:
            raise AssertionError(f"{what} did not come true within {bound_s} s")
        time.sleep(0.002)


def require(holds, otherwise):
    """Fail also in a process in which assert statements do nothing (``python -O``)."""
    if not holds:
        raise AssertionError(otherwise)


class Engine:
    """All ranks of one engine."""

    def __init__(self, name, shape, *, config=QUICK, compatibility=None, make_transport=MemoryTransport, port=0,
                 num_layers=2, layout=None):  # fmt: skip
        if layout is None:
            layout = engine(name, shape, TOTAL_HEADS, num_layers=num_layers, num_blocks=NUM_BLOCKS, base=1 << 20)
        self.layout, self.memories = in_memory(layout)
        self.name = name
        self.block_size = shape.block_size if shape else None
        self.config = config
        self.compatibility = COMPATIBILITY if compatibility is None else compatibility
        self.transports = []
        self.sessions = []
        self.done = {"sent": [set() for _ in layout.ranks], "received": [set() for _ in layout.ranks],
                     "failed": [{} for _ in layout.ranks]}  # fmt: skip
        self.desk = FrontDesk(host="127.0.0.1", port=port, config=config)
        for index, memory in enumerate(self.memories):
            transport = make_transport()
            transport.register([MemoryRange(held.ctypes.data, held.nbytes) for held in memory.bytes])
            session = RankSession(
                identity=Identity(name, index, len(layout.ranks), self.compatibility),
                layout=memory.rank,
                transport=transport,
                config=config,
            )
            session.set_front_desk("127.0.0.1", self.desk.port)
            self.transports.append(transport)
            self.sessions.append(session)

    def start(self, *, publish=True):
        self.desk.start()
        for session in self.sessions:
            session.start()
        if publish:
            self.publish()
        return self

    def publish(self):
        self.desk.publish(self.name, self.compatibility, [session.hello() for session in self.sessions])

    def table(self, num_tokens, *, first_block=1, first_token=0):
        count = -(-num_tokens // self.block_size) - first_token // self.block_size
        return (BlockTable(first_token, tuple(range(first_block, first_block + count))),)

    def fill(self, tables):
        for memory in self.memories:
            write_coordinates(memory, tables)

    def offer(self, request_id, tables, num_tokens, *, generation="g1", lease_s=0.0, ranks=None):
        """Offer on the ranks; return the reference."""
        offer = Offer(request_id, generation, tables, num_tokens, lease_s)
        for index in range(len(self.sessions)) if ranks is None else ranks:
            self.sessions[index].offer(offer)
        return self.reference(request_id, tables, num_tokens, generation=generation)

    def reference(self, request_id, tables, num_tokens, *, generation="g1"):
        return RemoteRef(self.name, "127.0.0.1", self.desk.port, request_id, generation, tables, num_tokens)

    def read(self, request_id, remote, tables, *, ranks=None):
        for index in range(len(self.sessions)) if ranks is None else ranks:
            self.sessions[index].read(ReadRequest(request_id, remote, tables))

    def release(self, remote):
        for session in self.sessions:
            session.release(remote)

    def collect(self):
        """Take results of all ranks; a request that is reported twice is an error."""
        for index, session in enumerate(self.sessions):
            results = session.take_results()
            for kind, new in (("sent", results.sent), ("received", results.received)):
                require(not new & self.done[kind][index], f"{kind} twice on rank {index}: {new}")
                self.done[kind][index] |= new
            over = self.done["received"][index] | self.done["failed"][index].keys()
            require(not results.failed.keys() & over, f"failed twice on rank {index}: {results.failed}")
            self.done["failed"][index] |= results.failed

    def sent(self, request_id):
        """Whether all ranks have freed an offer."""
        self.collect()
        return all(request_id in ids for ids in self.done["sent"])

    def received(self, request_id):
        self.collect()
        require(not any(request_id in failed for failed in self.done["failed"]), str(self.done["failed"]))
        return all(request_id in ids for ids in self.done["received"])

    def failures(self, request_id):
        """The reasons by rank once all ranks have reported, else None."""
        self.collect()
        failed = self.done["failed"]
        over = all(request_id in f or request_id in r for f, r in zip(failed, self.done["received"], strict=True))
        return [f[request_id].reason if request_id in f else "received" for f in failed] if over else None

    def details(self, request_id):
        return [failed[request_id].detail for failed in self.done["failed"] if request_id in failed]

    def total(self, name):
        return sum(session.stats()[name] for session in self.sessions)

    def check(self, tables, num_tokens):
        """Check that the ranks hold exactly the request's tokens (whole blocks move, so later ones are free)."""
        for memory in self.memories:
            check_moved(memory, tables, lambda token: token is None or token < num_tokens)

    def close(self, timeout_s=None):
        for session in self.sessions:
            session.close(timeout_s)
        self.desk.close()

    def wipe(self):
        for memory in self.memories:
            for held in memory.bytes:
                held[:] = UNTOUCHED


@contextmanager
def pair(p_shape=P_SHAPE, d_shape=D_SHAPE, *, p_options=None, d_options=None):
    """Yield a running prefill and decode engine."""
    prefill = Engine("prefill-0", p_shape, **(p_options or {})).start()
    decode = Engine("decode-0", d_shape, **(d_options or {})).start()
    try:
        yield prefill, decode
    finally:
        decode.close()
        prefill.close()
