"""What does the handshake cost, in time and memory: kvplan's plan, and vLLM's registration of descriptors for every block?

    python benchmarks/bench_handshake.py [--blocks 20000] [--layers 64] [--no-peer] [--rounds 9] [--report]

kvplan: the hello is decoded, the layouts are validated, the election is made, the plans are generated and proved; nothing
depends on the number of blocks. Peer: vLLM 0.32's own functions for the same engine, on a plain object in place of its
worker, and NIXL's `prep_xfer_dlist` on really registered memory, whose blocks are a few bytes small so that it fits. Peak
memory is the growth of this process's resident memory for the peer, and what Python's allocator saw for kvplan, which is
too little to be seen otherwise.
"""

from __future__ import annotations

import gc
import statistics
import time
import uuid
from types import SimpleNamespace

import numpy as np

from kvplan.layouts import AttentionSpec, CacheGeometry, EngineSpec, Mamba2Spec, Parallel, engine_layout
from kvplan.planner import elect, plan_rank
from kvplan.wire.codec import decode, encode
from kvplan.wire.layouts import from_body, to_body
from kvplan.wire.messages import Hello, RankCard
from lab.memory import PeakRss, traced_peak
from lab.report import Report, parser, seconds, size

HEADS = 8
KIB = 1 << 10


def attention(layers, tp, blocks, block_size=16, name="engine"):
    """Return an engine of full attention layers, K and V in regions of their own."""
    specs = tuple(AttentionSpec(name=f"model.layers.{i}.attn", num_kv_heads=HEADS, head_dim=128) for i in range(layers))
    cache = CacheGeometry(block_size=block_size, num_blocks=blocks)
    return engine_layout(
        EngineSpec(engine_id=name, layers=specs, num_layers=layers, parallel=Parallel(tp=tp), cache=cache)
    )


def hybrid(layers, tp, name):
    """Return an engine of every fourth layer attention, the others Mamba2, in shared regions."""
    specs = tuple(
        AttentionSpec(name=f"model.layers.{i}.attn", num_kv_heads=HEADS, head_dim=128, group=0)
        if i % 4 == 3
        else Mamba2Spec(
            name=f"model.layers.{i}.mixer", group=1 + i % 4, num_heads=128, head_dim=64, state_size=128, num_groups=8
        )
        for i in range(layers)
    )
    cache = CacheGeometry(block_size=1600, num_blocks=2000, shared_regions=True)
    return engine_layout(
        EngineSpec(engine_id=name, layers=specs, num_layers=layers, parallel=Parallel(tp=tp), cache=cache)
    )


def hello_frame(layout):
    """Return what crosses the wire."""
    cards = tuple(RankCard("127.0.0.1:5000", "nixl", b"metadata") for _ in layout.ranks)
    return encode(Hello(engine_id=layout.engine_id, compatibility={"model": "m"}, layout=to_body(layout), ranks=cards))


def shake(frame, own, rank=0):
    """Do what a session does with a hello, but for the comparison of compatibility fields."""
    hello = decode(frame)
    theirs = from_body(hello.engine_id, hello.layout)
    election = elect(theirs, own, salt=0)
    return plan_rank(theirs, own, rank, election=election)


def measure_ours(source, destination, rounds):
    """Return (median seconds, lowest, highest, peak bytes, bytes kept)."""
    frame = hello_frame(source)
    taken = []
    for _ in range(rounds + 2):
        gc.collect()
        began_at = time.perf_counter()
        plans = shake(frame, destination)
        taken.append(time.perf_counter() - began_at)
        del plans
    taken = taken[2:]
    _, peak, held = traced_peak(lambda: shake(frame, destination))
    return statistics.median(taken), min(taken), max(taken), peak, held


def measure_peer(layers, blocks, tp):
    """Return (seconds, growth of resident memory at its peak) of what vLLM 0.32 does for the same handshake.

    One decode rank of TP ``tp[1]`` connects to all ranks of TP ``tp[0]`` that it reads from; all of them are agents in this
    process. Counted is what ``add_remote_agent`` does after NIXL's own ``add_remote_agent``.
    """
    from lab.peer import PeerReader, make_agent

    element = 4  # bytes of one block of one head: the number of descriptors counts, not their size
    heads = [max(1, HEADS // size_) for size_ in tp]
    keep, remotes = [], []
    agents = [make_agent(f"peer-{uuid.uuid4().hex[:8]}") for _ in range(tp[0])]
    for agent in agents:
        regions = _regions(keep, layers, blocks, heads[0] * element)
        agent.register_memory(
            agent.get_reg_descs([(r.base, r.num_bytes, 0, "") for r in regions], "DRAM"), backends=["UCX"]
        )
        remotes.append((agent.get_agent_metadata(), regions))
    mine = make_agent(f"peer-{uuid.uuid4().hex[:8]}")
    reader = PeerReader(
        mine,
        _regions(keep, layers, blocks, heads[1] * element),
        block_size=16,
        tp_rank=0,
        tp_size=tp[1],
        num_heads=HEADS,
    )
    for rank, (blob, _) in enumerate(remotes):
        reader._agents[rank] = mine.add_remote_agent(blob)
    with PeakRss() as memory:
        began_at = time.perf_counter()
        reader.handshake(remotes, remote_block_size=16)
        taken = time.perf_counter() - began_at
    return taken, memory.grown


def _regions(keep, layers, blocks, block_bytes):
    area = np.ones(layers * 2 * blocks * block_bytes, np.uint8)
    keep.append(area)
    return [
        SimpleNamespace(base=area.ctypes.data + i * blocks * block_bytes, num_blocks=blocks, block_stride_bytes=block_bytes,
                        num_bytes=blocks * block_bytes)
        for i in range(2 * layers)
    ]  # fmt: skip


def main():
    """Measure and print."""
    options = parser(__doc__)
    options.set_defaults(rounds=9)
    options.add_argument("--layers", type=int, default=64)
    options.add_argument("--blocks", type=int, default=20_000, help="blocks of each region, for the peer's cell")
    options.add_argument("--no-peer", action="store_true")
    options = options.parse_args()
    report = Report(__file__, __doc__)
    ours = report.table(
        "kvplan's handshake, one decode rank",
        "layers",
        "TP",
        "blocks",
        "median",
        "lowest - highest",
        "peak memory",
        "kept",
        "hello",
    )

    def cell(label, source, destination, blocks, layers):
        median, low, high, peak, held = measure_ours(source, destination, options.rounds)
        ours.row(layers, label, f"{blocks:,}", seconds(median), f"{seconds(low)} - {seconds(high)}", size(peak), size(held),
                 size(len(hello_frame(source))))  # fmt: skip
        print(f"{layers} layers, {label}, {blocks:,} blocks: {seconds(median)}, {size(peak)}", flush=True)
        return median, peak

    by_blocks = {}
    for blocks in (1_000, 20_000, 100_000, 1_000_000):
        sides = attention(options.layers, 4, blocks), attention(options.layers, 1, blocks, name="decode")
        by_blocks[blocks] = cell("4 -> 1", *sides, blocks, options.layers)
    for tp in ((1, 1), (1, 8), (8, 1), (8, 4), (3, 2)):
        sides = attention(options.layers, tp[0], 20_000), attention(options.layers, tp[1], 20_000, name="decode")
        cell(f"{tp[0]} -> {tp[1]}", *sides, 20_000, options.layers)
    for layers in (1, 16, 128):
        cell("4 -> 1", attention(layers, 4, 20_000), attention(layers, 1, 20_000, name="decode"), 20_000, layers)
    hybrid_s, _ = cell("8 -> 4 hybrid", hybrid(80, 8, "p"), hybrid(80, 4, "d"), 2_000, 80)
    report.goal("80 layers, TP 8 -> 4, hybrid: below 50 ms", seconds(hybrid_s), reached=hybrid_s < 0.05)
    times = [value[0] for value in by_blocks.values()]
    peaks = [value[1] for value in by_blocks.values()]
    report.goal("constant in the number of blocks (1k to 1M)",
                f"times {max(times) / min(times):.2f} x, memory {max(peaks) / min(peaks):.2f} x apart",
                reached=max(times) < 2 * min(times) and max(peaks) < 1.1 * min(peaks))  # fmt: skip
    if not options.no_peer:
        compare(report, options)
    report.finish(options)


def compare(report, options):
    """Measure the peer and kvplan in turns."""
    sides = attention(options.layers, 4, options.blocks), attention(options.layers, 1, options.blocks, name="decode")
    found = []
    for _ in range(3):
        median, *_, peak, _ = measure_ours(*sides, options.rounds)
        taken, grown = measure_peer(options.layers, options.blocks, (4, 1))
        found.append((median, peak, taken, grown))
        gc.collect()
        print(f"peer: {seconds(taken)}, {size(grown)}", flush=True)
    ours_s, peak, peer_s, grown = (statistics.median(column) for column in zip(*found, strict=True))
    sheet = report.table(
        f"{options.layers} layers, K and V, {options.blocks:,} blocks, P_TP 4 -> D_TP 1: median of 3, in turns",
        "", "time", "peak memory",
    )  # fmt: skip
    sheet.row("kvplan", seconds(ours_s), size(peak))
    sheet.row("vLLM 0.32 NIXL connector", seconds(peer_s), size(grown))
    ratios = statistics.median(f[2] / f[0] for f in found), statistics.median(f[3] / f[1] for f in found)
    sheet.row("ratio", f"{ratios[0]:,.0f}", f"{ratios[1]:,.0f}")
    report.goal(
        "at least 1,000 times faster than the peer's handshake", f"{ratios[0]:,.0f} times", reached=ratios[0] >= 1000
    )
    report.goal("at least 100 times less memory", f"{ratios[1]:,.0f} times", reached=ratios[1] >= 100)


if __name__ == "__main__":
    main()
