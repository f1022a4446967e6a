"""Layouts of any axes at all: random cuts, replicas, holes, orders and strides on both sides, against brute force."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.planner import (
    Axis,
    BlockLayout,
    BlockTable,
    ComponentLayout,
    EngineLayout,
    RankLayout,
    Region,
    Span,
    bind,
    plan_engines,
)
from kvplan.testing.oracle import Memory, apply, check_moved, write_coordinates

ATOM = 2
NUM_BLOCKS = 4


@dataclass(frozen=True)
class Cut:
    """One rank's share of one axis: intervals of coordinates, ascending."""

    intervals: tuple[tuple[int, int], ...]


@st.composite
def cuts(draw: st.DrawFn, start: int, stop: int) -> Cut:
    """Draw a non-empty set of coordinates as intervals."""
    held = draw(st.lists(st.booleans(), min_size=stop - start, max_size=stop - start).filter(any))
    found: list[tuple[int, int]] = []
    for x, has in enumerate(held, start):
        if has and found and found[-1][1] == x:
            found[-1] = (found[-1][0], x + 1)
        elif has:
            found.append((x, x + 1))
    return Cut(tuple(found))


@st.composite
def blocks(draw: st.DrawFn, shares: dict[str, Cut], tokens: int | None) -> tuple[BlockLayout, int]:
    """Draw an order of axes, paddings and an order of the intervals inside each; return the layout and its bytes."""
    step = ATOM * draw(st.integers(1, 3))
    axes = []
    for name in draw(st.permutations(sorted(shares))):
        spans, at = [], 0
        for low, high in draw(st.permutations(shares[name].intervals)):
            if high - low > 1 and draw(st.booleans()):
                spans.append(Span(low, high, at + (high - low - 1) * step, -step))
            else:
                spans.append(Span(low, high, at, step))
            at += (high - low) * step + step * draw(st.integers(0, 1))
        axes.append(Axis(name, tuple(spans)))
        step = at
    base = draw(st.integers(0, 5))
    return BlockLayout(tuple(axes), ATOM, "bfloat16", base, tokens), step + base


@st.composite
def scenes(draw: st.DrawFn) -> tuple[EngineLayout, EngineLayout, int, list[BlockTable], list[BlockTable]]:
    """Draw a destination of two ranks and a source of one rank that holds everything and others that hold parts."""
    extent = {name: draw(st.tuples(st.integers(-3, 3), st.integers(1, 4))) for name in draw(
        st.sampled_from([("head",), ("head", "width"), ("channel", "head", "width"), ()]))}  # fmt: skip
    box = {name: (low, low + n) for name, (low, n) in extent.items()}
    state = draw(st.booleans()) and bool(box)
    s_tokens, d_tokens = (None, None) if state else draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))

    def engine(name: str, base: int, whole: bool, tokens: int | None, count: int) -> EngineLayout:
        ranks = []
        for tp in range(count):
            full = whole and tp == count - 1
            shares = {axis: Cut((span,)) if full else draw(cuts(*span)) for axis, span in box.items()}
            if tokens is not None:
                shares["token"] = Cut(((0, tokens),)) if full else draw(cuts(0, tokens))
            layout, size = draw(blocks(shares, tokens))
            region = Region(base, NUM_BLOCKS, size + draw(st.integers(0, 7)))
            base += region.num_bytes + 13
            ranks.append(RankLayout((region,), (ComponentLayout("l", "c", 0, 0, layout),), tp=tp))
        return EngineLayout(name, tuple(ranks))

    source = engine("p", 100, True, s_tokens, draw(st.integers(1, 3)))
    destination = engine("d", 1 << 30, False, d_tokens, 2)
    ids = st.permutations(range(NUM_BLOCKS))
    if s_tokens is None or d_tokens is None:
        n = draw(st.integers(1, NUM_BLOCKS))
        return source, destination, 1, [BlockTable(0, draw(ids)[:n])], [BlockTable(0, draw(ids)[:n])]
    num_tokens = draw(st.integers(1, NUM_BLOCKS * min(s_tokens, d_tokens)))
    skipped = draw(st.integers(0, math.ceil(num_tokens / d_tokens) - 1))
    s = BlockTable(0, draw(ids)[: math.ceil(num_tokens / s_tokens)])
    d = BlockTable(skipped * d_tokens, draw(ids)[: math.ceil(num_tokens / d_tokens) - skipped])
    return source, destination, num_tokens, [s], [d]


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenes())
def test_any_two_declarations_move_every_byte_right(
    scene: tuple[EngineLayout, EngineLayout, int, list[BlockTable], list[BlockTable]],
) -> None:
    source, destination, num_tokens, s, d = scene
    plan = plan_engines(source, destination)
    here, there = [Memory(r) for r in source.ranks], [Memory(r) for r in destination.ranks]
    for memory in here:
        write_coordinates(memory, s)
    for pair in plan.pairs:
        runs = bind(pair, s, d, num_tokens=num_tokens, whole_blocks=False)
        apply(runs, here[pair.source_rank], there[pair.destination_rank])
    for memory in there:
        check_moved(memory, d, lambda token: token is None or d[0].first_token <= token < num_tokens)
