"""Plans: errors name coordinates, elections are balanced, runs fold, and cost does not grow with blocks."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from kvplan.errors import BindError, FormatMismatchError, MissingLayerError, PlanError, UncoveredError
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
    elect,
    period_tokens,
    plan_engines,
    plan_rank,
)  # fmt: skip
from kvplan.testing.strategies import Shape, engine


def side(parallel: int, order: str = "HND", packing: str = "split", *, base: int = 4096, heads: int = 8,
         layers: int = 2, block: int = 6, blocks: int = 50, gap: int = 0) -> EngineLayout:  # fmt: skip
    return engine("e", Shape(parallel, block, block, order, packing), heads, num_layers=layers, num_blocks=blocks,
                  base=base, gap=gap)  # fmt: skip


def rows_per_period(source: EngineLayout, destination: EngineLayout) -> list[int]:
    return [len(part.rows.num_bytes) for pair in plan_engines(source, destination).pairs for part in pair.parts]


def test_equal_sides_move_a_block_as_one_run() -> None:
    assert rows_per_period(side(2), side(2, base=1 << 40)) == [1, 1]


def test_k_next_to_v_is_one_run_when_both_sides_pack() -> None:
    plan = plan_engines(side(1, packing="packed"), side(1, packing="packed", base=1 << 40))
    part = plan.pairs[0].parts[0]
    assert part.rows.num_bytes.tolist() == [2 * 8 * 6 * 8]
    assert part.num_regions == 2


def test_consecutive_ids_become_one_run_and_shuffled_ones_do_not() -> None:
    (pair,) = plan_rank(side(1), side(1, base=1 << 40), 0)
    near = bind(pair, [BlockTable(0, range(3, 13))], [BlockTable(0, range(20, 30))], num_tokens=60, whole_blocks=True)
    assert len(near) == 4
    order = [2 * i for i in range(10)]
    far = bind(pair, [BlockTable(0, order)], [BlockTable(0, order)], num_tokens=60, whole_blocks=True)
    assert len(far) == 40
    assert near.total_bytes == far.total_bytes == 4 * 60 * 8 * 8


def test_pairs_that_run_on_merge_whatever_their_order_in_the_table() -> None:
    (pair,) = plan_rank(side(1), side(1, base=1 << 40), 0)
    order = list(np.random.default_rng(7).permutation(20))
    runs = bind(pair, [BlockTable(0, order)], [BlockTable(0, order)], num_tokens=120, whole_blocks=True)
    assert len(runs) == 4


def test_nhd_with_unequal_parallel_sizes_has_a_run_per_token() -> None:
    assert rows_per_period(side(1, "NHD"), side(2, "NHD", base=1 << 40)) == [6, 6]


def test_block_outermost_layers_become_one_run() -> None:
    token = Axis("token", (Span(0, 4, 0, 8),))
    blocks = [BlockLayout((token,), 8, "uint8[8]", base, 4) for base in (0, 32, 64)]

    def one(base: int) -> EngineLayout:
        items = tuple(ComponentLayout(f"l{i}", "k", 0, 0, b) for i, b in enumerate(blocks))
        return EngineLayout("e", (RankLayout((Region(base, 10, 96),), items),))

    (pair,) = plan_engines(one(0), one(1 << 30)).pairs
    assert [len(part.rows.num_bytes) for part in pair.parts] == [1]
    assert pair.summary().smallest_run == 96


def test_uncovered_names_layer_component_axis_and_interval() -> None:
    source = side(2)
    half = replace(source, ranks=source.ranks[:1])
    with pytest.raises(UncoveredError, match=r"layer 'layer.0' component 'k': axis 'kv_head' \[4, 8\)") as caught:
        plan_engines(half, side(1, base=1 << 40))
    assert (caught.value.layer, caught.value.component) == ("layer.0", "k")
    assert (caught.value.axis, caught.value.interval) == ("kv_head", (4, 8))


def test_a_combination_that_no_single_rank_holds_is_uncovered() -> None:
    def component(x: tuple[int, int], y: tuple[int, int]) -> ComponentLayout:
        axes = (Axis("x", (Span(*x, 0, 16),)), Axis("y", (Span(*y, 0, 1),)))
        return ComponentLayout("l", "s", 0, 0, BlockLayout(axes, 1, "uint8"))

    def one(*items: ComponentLayout) -> EngineLayout:
        region = (Region(0, 1, 256),)
        return EngineLayout("e", tuple(RankLayout(region, (item,), tp=i) for i, item in enumerate(items)))

    with pytest.raises(UncoveredError, match=r"no single source rank holds x \[1, 2\), y \[0, 1\)"):
        plan_engines(one(component((0, 1), (0, 1)), component((1, 2), (1, 2))), one(component((0, 2), (0, 2))))


def with_format(engine_layout: EngineLayout, format_: str, atom_bytes: int) -> EngineLayout:
    ranks = []
    for rank in engine_layout.ranks:
        items = [replace(c, block=replace(c.block, format=format_, atom_bytes=atom_bytes)) for c in rank.components]
        ranks.append(replace(rank, components=tuple(items)))
    return replace(engine_layout, ranks=tuple(ranks))


def test_formats_are_compared_and_never_converted() -> None:
    other = with_format(side(1, base=1 << 40), "float16[4]", 8)
    with pytest.raises(FormatMismatchError, match=r"layer 'layer.0' component 'k'.*bfloat16\[4\].*float16\[4\]") as e:
        plan_engines(side(1), other)
    assert {e.value.source, e.value.destination} == {"bfloat16[4]", "float16[4]"}


def test_a_layer_on_one_side_is_refused_unless_it_is_optional() -> None:
    more, fewer = side(1, layers=3), side(1, layers=2, base=1 << 40)
    with pytest.raises(MissingLayerError, match=r"'layer.2' component 'k' is at the source and not at the destination"):
        plan_engines(more, fewer)
    with pytest.raises(MissingLayerError, match="is at the destination and not at the source"):
        plan_engines(fewer, more)
    rank = more.ranks[0]
    items = tuple(replace(c, optional=c.layer == "layer.2") for c in rank.components)
    draft = replace(more, ranks=(replace(rank, components=items),))
    assert plan_engines(draft, fewer).not_moved == (("layer.2", "k"), ("layer.2", "v"))
    assert len(plan_engines(draft, more).not_moved) == 0


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_readers_are_balanced_for_all_pairs_up_to_32(heads: int) -> None:
    for p in range(1, 33):
        if p % heads and heads % p:
            continue
        for d in range(1, 33):
            if d % heads and heads % d:
                continue
            election = elect(side(p, heads=heads, layers=1, block=1), side(d, heads=heads, layers=1, block=1))
            readers = [len(r) for r in election.readers]
            assert max(readers) - min(readers) <= 1, (heads, p, d, readers)
            assert all(len(s) <= max(1, p) for s in election.sources)


def test_t01_and_t04_who_reads_from_whom() -> None:
    assert elect(side(1, heads=2), side(4, heads=2)).readers == ((0, 1, 2, 3),)
    sources = elect(side(8, heads=4), side(1, heads=4)).sources[0]
    assert [rank // 2 for rank in sources] == [0, 1, 2, 3]
    assert elect(side(2, heads=4), side(8, heads=4)).sources == tuple((d // 4,) for d in range(8))


def test_salt_spreads_engines_over_replicas_within_their_share() -> None:
    for salt in range(4):
        election = elect(side(16, heads=1), side(4, heads=1), salt=salt)
        assert election.sources == tuple((4 * rank + salt,) for rank in range(4))


def test_an_election_of_other_engines_is_refused() -> None:
    with pytest.raises(PlanError, match="the election does not know destination rank 1"):
        plan_rank(side(1), side(2, base=1 << 40), 1, election=elect(side(1), side(1)))


def test_periods() -> None:
    assert period_tokens(48, 32) == 96
    assert period_tokens(528, 544) == 17952


def test_planning_does_not_depend_on_the_number_of_blocks() -> None:
    def cost(blocks: int) -> tuple[float, int]:
        source = side(4, layers=64, block=16, blocks=blocks)
        destination = side(1, layers=64, block=16, blocks=blocks, base=1 << 44)
        plan_rank(source, destination, 0)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            plan_rank(source, destination, 0)
            times.append(time.perf_counter() - start)
        tracemalloc.start()
        plan_rank(source, destination, 0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return min(times), peak

    few, many = cost(100), cost(20_000)
    assert many[0] < 0.05
    assert many[1] < 10_000_000
    assert abs(many[1] - few[1]) < 200_000


def test_bind_refuses_what_does_not_fit() -> None:
    (pair,) = plan_rank(side(1), side(1, base=1 << 40), 0)

    def attempt(s: BlockTable, d: BlockTable, num_tokens: int = 12) -> None:
        bind(pair, [s], [d], num_tokens=num_tokens, whole_blocks=True)

    with pytest.raises(BindError, match=r"source block id 50 is not in \[0, 50\)"):
        attempt(BlockTable(0, (1, 50)), BlockTable(0, (1, 2)))
    with pytest.raises(BindError, match=r"destination block id -2 is not in"):
        attempt(BlockTable(0, (1, 2)), BlockTable(0, (1, -2)))
    with pytest.raises(BindError, match="first_token 3 is not a multiple of tokens_per_block 6"):
        attempt(BlockTable(3, (1, 2)), BlockTable(0, (1, 2)))
    with pytest.raises(BindError, match="needs tokens from 6, but the source has no block"):
        attempt(BlockTable(0, (1,)), BlockTable(0, (1, 2)))
    with pytest.raises(BindError, match="needs tokens from 6"):
        attempt(BlockTable(0, (1, -1)), BlockTable(0, (1, 2)))
    other = replace(pair, parts=(replace(pair.parts[0], source_group=1),))
    with pytest.raises(BindError, match="has 1 block tables, but the plan needs group 1"):
        bind(other, [BlockTable(0, (1,))], [BlockTable(0, (1,))], num_tokens=3, whole_blocks=True)


def test_a_window_needs_only_its_own_tokens() -> None:
    source, destination = side(1, block=6), side(1, block=9, base=1 << 40)
    (pair,) = plan_rank(source, destination, 0)
    s, d = BlockTable(12, (1, 2)), BlockTable(9, (3, 4))
    with pytest.raises(BindError, match="needs tokens from 9"):
        bind(pair, [s], [d], num_tokens=24, whole_blocks=False)
    runs = bind(pair, [s], [replace(d, needed_from=14)], num_tokens=24, whole_blocks=False)
    assert runs.total_bytes == 4 * 12 * 8 * 8


def test_t21_each_side_may_hold_blocks_that_the_other_lacks() -> None:
    (pair,) = plan_rank(side(1, block=64), side(1, block=64, base=1 << 40), 0)
    runs = bind(pair, [BlockTable(0, (1, 2))], [BlockTable(0, (3, 4, 5))], num_tokens=128, whole_blocks=True)
    assert runs.total_bytes == 4 * 128 * 8 * 8


def test_t16_no_block_is_read_beyond_the_last_token() -> None:
    source, destination = side(1, block=64, blocks=100), side(1, block=32, blocks=200, base=1 << 40)
    (pair,) = plan_rank(source, destination, 0)
    runs = bind(pair, [BlockTable(0, range(79))], [BlockTable(0, range(158))], num_tokens=5000, whole_blocks=True)
    assert runs.total_bytes == 4 * 157 * 32 * 8 * 8


def test_state_blocks_are_paired_in_order() -> None:
    block = BlockLayout((Axis("state_head", (Span(0, 4, 0, 32),)),), 32, "float32[8]")

    def one(base: int) -> EngineLayout:
        return EngineLayout("e", (RankLayout((Region(base, 9, 200),), (ComponentLayout("l", "ssm", 0, 0, block),)),))

    (pair,) = plan_engines(one(0), one(1 << 30)).pairs
    runs = bind(pair, [BlockTable(0, (8, 3))], [BlockTable(0, (1, 5))], num_tokens=7, whole_blocks=True)
    assert sorted(zip(runs.source_address.tolist(), runs.destination_address.tolist(), strict=True)) == [
        (600, (1 << 30) + 1000),
        (1600, (1 << 30) + 200),
    ]
    with pytest.raises(BindError, match="the source names 1 and the destination 2"):
        bind(pair, [BlockTable(0, (8,))], [BlockTable(0, (1, 5))], num_tokens=7, whole_blocks=True)
    with pytest.raises(BindError, match="needs state block 1, but the source has no block for it"):
        bind(pair, [BlockTable(0, (8, -1))], [BlockTable(0, (1, 5))], num_tokens=7, whole_blocks=True)
    hole = bind(
        pair, [BlockTable(0, (-1,))], [BlockTable(0, (1,))], num_tokens=7, whole_blocks=True, require_cover=False
    )
    assert len(hole) == 0


@pytest.mark.parametrize("tokens", [1 << 20, 1 << 40, (1 << 18) + 1])
def test_block_sizes_that_hardly_ever_meet_are_refused_at_once(tokens: int) -> None:
    """A peer may name any number; the plan is a pattern that is as long as it takes two block sizes to repeat."""
    here = side(1)
    rank = here.ranks[0]
    absurd = tuple(replace(item, block=replace(item.block, tokens_per_block=tokens)) for item in rank.components)
    there = EngineLayout("absurd", (replace(rank, components=absurd),))
    started = time.monotonic()
    for source, destination in ((there, here), (here, there)):
        with pytest.raises(FormatMismatchError, match="meet the other side's blocks anew only after"):
            elect(source, destination)
        with pytest.raises(FormatMismatchError, match="meet the other side's blocks"):
            plan_rank(source, destination, 0)
    assert time.monotonic() - started < 1
