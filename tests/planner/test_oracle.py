"""The planner against brute-force memory: every byte of the destination right, nothing else written."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.planner import BlockTable, EngineLayout, bind, plan_engines
from kvplan.testing.oracle import Memory, apply, check_moved, write_coordinates
from kvplan.testing.strategies import Shape, engine, requests, shapes

NUM_BLOCKS = 4
SOURCE_BASE, DESTINATION_BASE = 4096, 1 << 40


def move(
    source: EngineLayout, destination: EngineLayout, num_tokens: int, s: BlockTable, d: BlockTable, *, whole: bool
) -> None:
    """Plan, move and check one request between two engines."""
    plan = plan_engines(source, destination)
    here = [Memory(rank) for rank in source.ranks]
    there = [Memory(rank) for rank in destination.ranks]
    for memory in here:
        write_coordinates(memory, [s])
    for pair in plan.pairs:
        runs = bind(pair, [s], [d], num_tokens=num_tokens, whole_blocks=whole)
        apply(runs, here[pair.source_rank], there[pair.destination_rank])
    s_tokens, d_tokens = (e.ranks[0].components[0].block.tokens_per_block or 0 for e in (source, destination))
    limit = num_tokens
    if whole:
        limit = min(math.ceil(num_tokens / s_tokens) * s_tokens, math.ceil(num_tokens / d_tokens) * d_tokens)
    for memory in there:
        check_moved(memory, [d], lambda token: token is not None and d.first_token <= token < limit)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[EngineLayout, EngineLayout, int, BlockTable, BlockTable, bool]:
    total = draw(st.integers(1, 12))
    left, right = draw(shapes()), draw(shapes())
    if left.packing == right.packing == "interleaved":
        right = Shape(right.parallel, right.block_size, right.kernel_block_size, right.order, "split")
    source = engine("p", left, total, num_layers=1, num_blocks=NUM_BLOCKS, base=SOURCE_BASE)
    destination = engine("d", right, total, num_layers=1, num_blocks=NUM_BLOCKS, base=DESTINATION_BASE)
    num_tokens, s, d = draw(requests(left.block_size, right.block_size, num_blocks=NUM_BLOCKS))
    return source, destination, num_tokens, s, d, draw(st.booleans())


@pytest.mark.timeout(600)  # two thousand pairs, a minute on a quiet machine
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs())
def test_every_byte_is_right_and_nothing_else_is_written(
    pair: tuple[EngineLayout, EngineLayout, int, BlockTable, BlockTable, bool],
) -> None:
    source, destination, num_tokens, s, d, whole = pair
    move(source, destination, num_tokens, s, d, whole=whole)
