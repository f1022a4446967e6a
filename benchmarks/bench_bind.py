"""How long does it take to bind a request's blocks, beside one vectorised addition over as many ids?

    python benchmarks/bench_bind.py [--regions 128] [--rounds 25] [--report]

Block ids of 16 tokens each, in pools of 20,000 blocks. The unit is one `ids + base` of numpy over as many int64 numbers
as the request has blocks in all regions together, result allocated, as binding must allocate its own. `posted` is what is
left after neighbours have been joined.
"""

from __future__ import annotations

import numpy as np

from bench_handshake import attention
from kvplan.planner import BlockTable, bind, plan_rank
from kvplan.session.routing import Terms, route
from kvplan.transport.cost import cost_model
from lab.figures import measure, timed
from lab.report import Report, parser, seconds

POOL = 20_000
BLOCK = 16


def orders(count):
    """Yield (name, source ids, destination ids) from contiguous to random, int64."""
    rng = np.random.default_rng(1)
    here = np.arange(count, dtype=np.int64)
    yield "contiguous", here + 100, here + 500
    for run in (64, 8, 2):
        yield f"runs of {run}", *(_in_runs(rng, count, run) for _ in range(2))
    together = rng.permutation(count)
    yield "shuffled together", together + 100, together + 500
    yield "random", *(rng.permutation(POOL)[:count] for _ in range(2))


def _in_runs(rng, count, run):
    starts = rng.permutation(POOL // run)[: -(-count // run)] * run
    return (starts[:, None] + np.arange(run)).reshape(-1)[:count]


def main():
    """Measure and print."""
    options = parser(__doc__)
    options.set_defaults(rounds=25, patience=1.0)
    options.add_argument("--regions", type=int, default=128)
    options = options.parse_args()
    report = Report(__file__, __doc__)
    layers = options.regions // 2
    source, destination = attention(layers, 1, POOL), attention(layers, 1, POOL, name="decode")
    (plan,) = plan_rank(source, destination, 0)
    sheet = report.table(
        f"binding, {options.regions} regions, blocks of {BLOCK} tokens", "tokens", "block ids", "blocks x regions", "posted",
        "bind", "lowest - highest", "one addition", "bind : addition", "bind and route",
    )  # fmt: skip
    bases = np.array([region.base for region in source.ranks[0].regions], np.int64)
    terms = Terms(bases, 8 << 20, 32 << 10, 4 << 20, 16 << 10, 1 << 20)
    cost = cost_model("nixl")
    worst, best = [], []
    for tokens in (1_024, 8_192, 32_768, 131_072):
        count = tokens // BLOCK
        for name, here, there in orders(count):
            tables = (BlockTable(0, here),), (BlockTable(0, there),)
            ids = np.arange(count * options.regions, dtype=np.int64)

            def bound(tables=tables, tokens=tokens):
                return bind(plan, *tables, num_tokens=tokens, whole_blocks=True)

            ways = {
                "bind": timed(bound),
                "add": timed(lambda ids=ids: ids + 4096),
                "route": timed(lambda: route(bound(), cost, terms)),
            }
            figures = measure(ways, rounds=options.rounds, patience=options.patience, warm=3)
            ratio = 1 / figures.ratio("bind", "add")
            low, high = figures.spread("bind")
            sheet.row(f"{tokens:,}", name, f"{len(ids):,}", f"{len(bound()):,}", seconds(figures.median("bind")),
                      f"{seconds(low)} - {seconds(high)}", seconds(figures.median("add")), f"{ratio:.1f}",
                      seconds(figures.median("route")))  # fmt: skip
            if tokens == 131_072:
                worst.append((ratio, name))
            if name == "contiguous":
                best.append((figures.median("bind"), tokens))
    report.goal(f"131k tokens x {options.regions} regions: within 10 additions at worst",
                "{:.1f} ({})".format(*max(worst)), reached=max(worst)[0] <= 10)  # fmt: skip
    report.goal(
        "contiguous ids: at most 0.3 ms",
        f"{seconds(max(best)[0])} ({max(best)[1]:,} tokens)",
        reached=max(best)[0] <= 0.3e-3,
    )
    report.finish(options)


if __name__ == "__main__":
    main()
