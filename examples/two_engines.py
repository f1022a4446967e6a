"""A complete connector for engines of your own: two processes, other TP, other blocks, other layout. No vLLM.

The prefill engine has 4 ranks, blocks of 48 tokens, stored [token][head][dim]; the decode engine has 3 ranks, blocks of
32 tokens, stored [head][token][dim]. Each rank declares its arrays; kvplan does the rest.

    declare -> hello -> (plan) -> offer | read -> done

Run it: python examples/two_engines.py
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from kvplan.planner import Axis, BlockLayout, BlockTable, ComponentLayout, RankLayout, Region, Span
from kvplan.session import FrontDesk, Identity, Offer, RankSession, ReadRequest, RemoteRef, Results, SessionConfig
from kvplan.transport import MemoryRange, Transport, create

LAYERS, HEADS, DIM, BLOCKS, TOKENS = 2, 12, 16, 20, 100
MODEL = {"model": "example", "kv_cache_dtype": "float32"}
HOST = "127.0.0.1"


def value(layer: int, which: int, token: np.ndarray, head: np.ndarray) -> np.ndarray:
    """What the cache holds at a coordinate: any function that tells them all apart."""
    return ((layer * 2 + which) * 1000 + token) * 100 + head


class Rank:
    """One rank of an engine: its arrays, its declaration, its session."""

    def __init__(self, engine_id: str, rank: int, tp: int, block: int, order: str) -> None:
        self.heads = np.arange(rank * HEADS // tp, (rank + 1) * HEADS // tp)
        self.order, self.block = order, block
        inner = (block, len(self.heads)) if order == "NHD" else (len(self.heads), block)
        self.cache = np.zeros((LAYERS, 2, BLOCKS, *inner, DIM), np.float32)
        identity = Identity(engine_id, rank, tp, MODEL)
        self.session = RankSession(
            identity=identity, layout=self.declare(rank), transport=self.transport(), config=SessionConfig()
        )

    def declare(self, rank: int) -> RankLayout:
        """Which coordinates lie at which bytes: read off the array's own strides."""
        token, head = (3, 4) if self.order == "NHD" else (4, 3)
        strides = self.cache.strides
        tokens = Axis("token", (Span(0, self.block, 0, strides[token]),))
        heads = Axis("kv_head", (Span(int(self.heads[0]), int(self.heads[-1]) + 1, 0, strides[head]),))
        block = BlockLayout((tokens, heads), DIM * 4, f"float32[{DIM}]", tokens_per_block=self.block)
        parts = [(layer, which) for layer in range(LAYERS) for which in (0, 1)]
        regions = tuple(Region(self.cache[part].ctypes.data, BLOCKS, strides[2]) for part in parts)
        components = tuple(
            ComponentLayout(f"layer.{layer}", "kv"[which], 0, i, block) for i, (layer, which) in enumerate(parts)
        )
        return RankLayout(regions, components, tp=rank)

    def transport(self) -> Transport:
        """Same host, so no NIXL needed; `create("nixl")` moves the same plan over a network."""
        carrier = create("cma", allow_any_tracer=True)
        carrier.register([MemoryRange(self.cache.ctypes.data, self.cache.nbytes)])
        return carrier

    def view(self, layer: int, which: int, table: BlockTable) -> np.ndarray:
        """The cache of a request as [token, head]: the first element of each vector."""
        held = self.cache[layer, which, list(table.block_ids), ..., 0]
        held = held if self.order == "NHD" else held.swapaxes(1, 2)
        return held.reshape(-1, len(self.heads))


def start(engine_id: str, tp: int, block: int, order: str) -> tuple[list[Rank], FrontDesk]:
    """Start every rank of an engine and the desk that tells others about them."""
    ranks = [Rank(engine_id, rank, tp, block, order) for rank in range(tp)]
    desk = FrontDesk(host=HOST, port=0, config=SessionConfig())
    desk.publish(engine_id, MODEL, [rank.session.hello() for rank in ranks])
    desk.start()
    for rank in ranks:
        rank.session.set_front_desk(HOST, desk.port)
        rank.session.start()
    return ranks, desk


def prefill(pipe: Connection) -> None:
    """The prefill engine: computes a prompt, offers its blocks, frees them when nobody reads them any more."""
    ranks, desk = start("prefill-1", tp=4, block=48, order="NHD")
    table = BlockTable(0, (7, 3, 9))
    token = np.arange(3 * 48)[:, None]
    for rank in ranks:
        for layer, which in np.ndindex(LAYERS, 2):
            shape = rank.cache[layer, which, list(table.block_ids), ..., 0].shape
            held = value(layer, which, token, rank.heads).reshape(3, 48, -1)
            rank.cache[layer, which, list(table.block_ids)] = held.reshape(shape)[..., None]
        rank.session.offer(Offer("request-1", "generation-1", (table,), TOKENS))
    pipe.send(RemoteRef("prefill-1", HOST, desk.port, "request-1", "generation-1", (table,), TOKENS))
    wait(ranks, lambda results: "request-1" in results.sent)
    pipe.send("blocks are free")
    stop(ranks, desk)


def wait(ranks: list[Rank], ended: Callable[[Results], bool], bound_s: float = 30.0) -> None:
    """Step until every rank has reported the end, within a bound."""
    open_ranks, ends_at = set(range(len(ranks))), time.monotonic() + bound_s
    while open_ranks:
        if time.monotonic() > ends_at:
            raise TimeoutError(f"ranks {sorted(open_ranks)} did not end within {bound_s} s")
        for rank in list(open_ranks):
            results = ranks[rank].session.take_results()
            if results.failed:
                raise RuntimeError(f"rank {rank}: {results.failed}")
            if ended(results):
                open_ranks.discard(rank)
        time.sleep(0.002)  # an engine's step


def stop(ranks: list[Rank], desk: FrontDesk) -> None:
    """Let nothing outlive the engine."""
    for rank in ranks:
        rank.session.close()
    desk.close()


def main() -> None:
    """The decode engine: has the first 32 tokens already, reads the others, checks every one."""
    pipe, far = mp.Pipe()
    process = mp.get_context("spawn").Process(target=prefill, args=(far,), daemon=True)
    process.start()
    remote = pipe.recv()
    ranks, desk = start("decode-1", tp=3, block=32, order="HND")
    table = BlockTable(32, (5, 6, 1))
    for rank in ranks:
        rank.session.read(ReadRequest("local-1", remote, (table,)))
    wait(ranks, lambda results: "local-1" in results.received)
    token = np.arange(32, TOKENS)[:, None]
    for rank in ranks:
        for layer, which in np.ndindex(LAYERS, 2):
            assert (rank.view(layer, which, table)[: len(token)] == value(layer, which, token, rank.heads)).all()
    print(f"every token right on {len(ranks)} ranks; the prefill engine says: {pipe.recv()}")
    stop(ranks, desk)
    process.join(10)


if __name__ == "__main__":
    main()
