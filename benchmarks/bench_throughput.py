"""How fast does a request's cache move between two processes: kvplan, vLLM's connector, NIXL alone, memcpy?

    python benchmarks/bench_throughput.py [--mib 64] [--only WORDS] [--transports nixl,cma] [--rounds 7] [--report]

Two processes on one host, memory on 4 KiB pages. A cell is a geometry and an order of block ids; its request moves about
as many MiB as `--mib` says. Per cell and round, in turns:

* `kvplan`: from `RankSession.read` to the report, claim and grant included; the request is offered before.
* `peer`: the way of vLLM 0.32's NIXL connector (`lab/peer.py`): indices, `make_prepped_xfer`, `transfer`, release, and
  its rearrangement of received blocks where it has one. Its handshake is not counted here.
* `NIXL alone`: one `initialize_xfer` on the merged runs of kvplan's plan.
* `memcpy`: as many bytes in one piece, inside this process.

One decode rank reads, rank 0. Every way's bytes are compared with what prefill holds before anything is timed.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

import numpy as np

from kvplan.planner import BlockTable, bind, plan_rank
from kvplan.session.binding import configured_cost, staging_terms
from kvplan.session.config import SessionConfig
from kvplan.session.routing import route
from lab.engines import Case, Pair, content
from lab.figures import measure, timed, wait_quiet
from lab.report import Report, parser, size

MIB = 1 << 20
KIB = 1 << 10
RUNS = {  # block bytes of one region, by (block size, KV heads of a rank); head_dim 128, bfloat16
    2 * KIB: (8, 1),
    4 * KIB: (16, 1),
    16 * KIB: (16, 4),
    64 * KIB: (32, 8),
    256 * KIB: (128, 8),
    1024 * KIB: (256, 16),
}
PLAIN = "equal TP"


def cells(num_bytes):
    """Yield (label, case, order of block ids, block bytes)."""
    for run, (block_size, heads) in RUNS.items():
        for order in ("runs on", "by 8", "shuffled", "random"):
            yield PLAIN, shaped(num_bytes, block_size, heads), order, run
    for run in (2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB):
        block_size, heads = RUNS[run]
        for order in ("runs on", "random"):
            yield "TP 1 -> 2", shaped(2 * num_bytes, block_size, 2 * heads, tp=(1, 2)), order, run
            yield "TP 2 -> 1", shaped(num_bytes, block_size, 2 * heads, tp=(2, 1)), order, run
    for order in ("runs on", "random"):
        nhd = {"block_size": 16, "kv_layout": "NHD"}
        yield "HND -> NHD", replace(shaped(num_bytes, 16, 8), destination=nhd), order, 256
        yield "block 16 -> 32", replace(shaped(num_bytes, 16, 8), destination={"block_size": 32}), order, 4 * KIB
        yield "block 32 -> 16", replace(shaped(num_bytes, 32, 8), destination={"block_size": 16}), order, 4 * KIB


def shaped(num_bytes, block_size, heads, tp=(1, 1)):
    """Return a case whose request has about so many bytes over all ranks."""
    token = heads * 256 * 2  # K and V of one layer
    layers = max(2, min(32, num_bytes // (token * block_size * 16)))
    tokens = max(1, num_bytes // (token * layers) // block_size) * block_size
    knobs = {"block_size": block_size}
    return Case("cell", layers, heads, tokens, source=knobs, destination=dict(knobs), tp=tp)


class Cell:
    """One cell, ready to be measured."""

    def __init__(self, case, order, transports, *, peer):
        self.case = case
        self.pair = Pair(case, transports=transports, peer=peer, ranks=(0,))
        self.source_ids, self.destination_ids = (case.ids(side, order, 7) for side in ("source", "destination"))
        self.tables = (BlockTable(0, self.source_ids),), (BlockTable(0, self.destination_ids),)
        self.config = SessionConfig()
        source = self.pair.source_layout()
        self.plans = plan_rank(source, self.pair.layout, 0)
        self.runs = [bind(plan, *self.tables, num_tokens=case.tokens, whole_blocks=True) for plan in self.plans]
        self.num_bytes = sum(runs.total_bytes for runs in self.runs)
        self.source = source
        self.spare = [np.ones(self.num_bytes, np.uint8), np.zeros(self.num_bytes, np.uint8)]
        self.ways = {f"kvplan {name}": self._kvplan(name) for name in transports}
        if peer:
            self._prepare_peer()
            if self.can_peer:
                self.ways["peer"] = timed(self._peer)
            self.ways["NIXL alone"] = timed(self._ideal)
        self.ways["memcpy"] = timed(self._memcpy)

    def _kvplan(self, transport):
        def run():
            (remote,) = self.pair.offer(transport, self.tables[0])
            return self.pair.read(transport, [remote], self.tables[1])

        return run

    def _prepare_peer(self):
        from lab.peer import IdealReader, PeerReader, make_agent

        self.agent = make_agent(f"peer-decode-{uuid.uuid4().hex[:8]}")
        mine, case = self.pair.layout.ranks[0].regions, self.case
        remotes = [
            (bytes.fromhex(blob), rank.regions)
            for blob, rank in zip(self.pair.child.hello["agents"], self.source.ranks, strict=True)
        ]
        self.reader = PeerReader(self.agent, mine, block_size=case.block_size("destination"), tp_rank=0,
                                 tp_size=case.tp[1], num_heads=case.heads)  # fmt: skip
        self.can_peer = case.block_size("destination") % case.block_size("source") == 0
        if self.can_peer:
            self.reader.handshake(remotes, remote_block_size=case.block_size("source"))
            agents = [self.reader._agents[plan.source_rank] for plan in self.plans]
        else:
            agents = [self.agent.add_remote_agent(remotes[plan.source_rank][0]) for plan in self.plans]
        self.ideal = [IdealReader(self.agent, name) for name in agents]
        permute = case.source.get("kv_layout", "HND") != case.destination.get("kv_layout", "HND")
        self.rearranges = permute or self.reader_ratio() > 1
        self.permute = permute
        self.caches = self._caches() if self.rearranges and self.can_peer else []

    def reader_ratio(self):
        return self.case.block_size("destination") // self.case.block_size("source") if self.can_peer else 1

    def _caches(self):
        """Return decode's regions as vLLM's tensors [blocks, heads, tokens, elements], whatever their memory order is."""
        import torch

        size_, heads = self.case.block_size("destination"), self.case.heads // self.case.tp[1]
        found = []
        for area in self.pair.memory[0]:
            flat = torch.from_numpy(area).view(torch.bfloat16)
            if self.case.destination.get("kv_layout", "HND") == "NHD":
                found.append(flat.view(-1, size_, heads, self.case.head_dim).permute(0, 2, 1, 3))
            else:
                found.append(flat.view(-1, heads, size_, self.case.head_dim))
        return found

    def _peer(self):
        self.reader.read(self.source_ids, self.destination_ids)
        if self.rearranges:
            self.reader.rearrange(self.caches, self.destination_ids, permute=self.permute)

    def _ideal(self):
        for reader, runs in zip(self.ideal, self.runs, strict=True):
            reader.read(runs)

    def _memcpy(self):
        self.spare[1][:] = self.spare[0]

    def check(self):
        """Compare every way's bytes with what prefill holds."""
        expected = self._expected()
        for name, way in self.ways.items():
            if name == "memcpy":
                continue
            self.pair.wipe()
            way()
            for number, (have, want) in enumerate(zip(self.pair.memory[0], expected, strict=True)):
                if not np.array_equal(have, want):
                    raise SystemExit(f"{name}: wrong bytes in region {number}")

    def _expected(self):
        """Return decode's memory after the request, from prefill's content and kvplan's plan, one run at a time."""
        mine = self.pair.layout.ranks[0].regions
        expected = [np.zeros(r.num_bytes, np.uint8) for r in mine]
        for plan, runs in zip(self.plans, self.runs, strict=True):
            theirs = self.source.ranks[plan.source_rank].regions
            held = [content(self.pair.seed, plan.source_rank, i, r.num_bytes) for i, r in enumerate(theirs)]
            s_base, d_base = (np.array([r.base for r in regions], np.uint64) for regions in (theirs, mine))
            s_order, d_order = np.argsort(s_base), np.argsort(d_base)
            s_at = s_order[np.searchsorted(s_base[s_order], runs.source_address, side="right") - 1]
            d_at = d_order[np.searchsorted(d_base[d_order], runs.destination_address, side="right") - 1]
            s_off, d_off = runs.source_address - s_base[s_at], runs.destination_address - d_base[d_at]
            for a, b, x, y, n in zip(s_at, d_at, s_off.tolist(), d_off.tolist(), runs.num_bytes.tolist(), strict=True):
                expected[b][y : y + n] = held[a][x : x + n]
        return expected

    def describe(self):
        """Return (mean run after merging, descriptors that kvplan posts over nixl)."""
        cost = configured_cost("nixl", self.config)
        ways = [
            route(
                runs, cost, staging_terms(self.source.ranks[plan.source_rank], self.pair.layout.ranks[0], self.config)
            )
            for plan, runs in zip(self.plans, self.runs, strict=True)
        ]
        mean = self.num_bytes // sum(len(runs) for runs in self.runs)
        staged = any(way.staged for way in ways)
        return mean, sum(way.num_reads for way in ways), staged

    def close(self):
        self.pair.close()


def main():
    """Measure and print."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--mib", type=int, default=64, help="MiB that one decode rank reads in each cell")
    options_parser.add_argument("--only", default="", help="only cells whose label and order contain these words")
    options_parser.add_argument("--transports", default="nixl,cma")
    options_parser.add_argument("--no-peer", action="store_true", help="leave vLLM's way and NIXL alone out")
    options_parser.add_argument(
        "--quiet-s", type=float, default=0.0, help="before each cell, wait so long for others to be quiet"
    )
    options = options_parser.parse_args()
    report = Report(__file__, __doc__)
    transports = tuple(filter(None, options.transports.split(",")))
    names = [f"kvplan {name}" for name in transports]
    columns = ["peer", "NIXL alone", "memcpy"][2 * options.no_peer :]
    sheet = report.table(
        f"one decode rank reads about {options.mib} MiB: GB/s, and ratios of times",
        "cell", "block ids", "block part", "mean run", "posted", *names, *columns,
        *(f"{name} : {other}" for name in names for other in columns[:-1]), "rounds",
    )  # fmt: skip
    found = []
    for label, case, order, run in cells(options.mib * MIB):
        if not all(word in f"{label}, {order}, {size(run)}" for word in filter(None, options.only.split(";"))):
            continue
        if options.quiet_s:
            wait_quiet(options.quiet_s)
        cell = Cell(case, order, transports, peer=not options.no_peer)
        try:
            cell.check()
            figures = measure(cell.ways, rounds=options.rounds, patience=options.patience)
            mean, posted, staged = cell.describe()
        finally:
            cell.close()
        found.append((label, order, run, mean, figures))
        speeds = [
            f"{cell.num_bytes / figures.median(n) / 1e9:.2f}" if n in figures else "-" for n in (*names, *columns)
        ]
        ratios = [f"{figures.ratio(n, o):.2f}" if o in figures else "-" for n in names for o in columns[:-1]]
        note = f"{options.rounds}" + (f" ({figures.num_disturbed} disturbed)" if figures.num_disturbed else "")
        sheet.row(
            label, order, size(run), size(mean), f"{posted:,}{' staged' if staged else ''}", *speeds, *ratios, note
        )
        print(
            f"{time.strftime('%X')} {label}, {order}, {size(run)}: {' '.join(speeds)} | {' '.join(ratios)} | {note}",
            flush=True,
        )
    goals(report, found, transports)
    report.finish(options)


def goals(report, found, transports):
    """Add the verdicts."""

    def worst(what, wanted, ours, other, chosen):
        ratios = [(f.ratio(ours, other), f"{label}, {order}, {size(run)}")
                  for label, order, run, mean, f in found if ours in f and other in f and chosen(label, order, run, mean)]  # fmt: skip
        if ratios:
            least, where = min(ratios)
            report.goal(what, f"{least:.2f} at least ({where})", reached=least >= wanted)

    if "nixl" in transports:
        ours = "kvplan nixl"
        worst("at least the peer's throughput in every cell", 1.0, ours, "peer", lambda *_: True)
        worst("2 x the peer for head-sliced runs up to 4 KiB, block ids run on", 2.0, ours, "peer",
              lambda label, order, run, mean: label.startswith("TP") and order == "runs on" and run <= 4 * KIB)  # fmt: skip
        worst("3 x the peer for mergeable 4 KiB blocks in shuffled order", 3.0, ours, "peer",
              lambda label, order, run, mean: label == PLAIN and order == "shuffled" and run == 4 * KIB)  # fmt: skip
        worst("0.9 of NIXL's own best for runs of 256 KiB and more", 0.9, ours, "NIXL alone",
              lambda label, order, run, mean: mean >= 256 * KIB)  # fmt: skip
    if "cma" in transports:
        worst("cma: 1.8 x NIXL alone for unmergeable 4 KiB runs", 1.8, "kvplan cma", "NIXL alone",
              lambda label, order, run, mean: label == PLAIN and order == "random" and run == 4 * KIB)  # fmt: skip


if __name__ == "__main__":
    main()
