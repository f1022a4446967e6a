"""Planning cases T01 to T33, with their own numbers. P is the source, D the destination, K the number of KV heads."""

from __future__ import annotations

import pytest

from kvplan.errors import BindError, BoundsError, DescriptionError, MissingLayerError, PlanError, UncoveredError
from kvplan.layouts import (
    AttentionSpec,
    IndexerSpec,
    LatentSpec,
    Mamba2Spec,
    SlidingWindowSpec,
)
from kvplan.layouts.hybrid import block_size_for_state, kernel_pages, largest_kernel_block
from kvplan.layouts.kernel_blocks import logical_to_kernel_block_ids
from kvplan.layouts.sliding_window import first_kept_token
from kvplan.planner import (
    Axis,
    BlockLayout,
    ComponentLayout,
    EngineLayout,
    RankLayout,
    Region,
    Span,
    plan_engines,
)
from tests.layouts.engines import moved, pair, planned


def attention(heads, head_dim=64, name="model.layers.0.self_attn", **more):
    return AttentionSpec(name=name, num_kv_heads=heads, head_dim=head_dim, **more)


def latent(name="model.layers.0.self_attn", dim=576):
    return LatentSpec(name=name, latent_dim=dim)


def at(layout, rank, region, block):
    """Return the address of a block."""
    own = layout.ranks[rank].regions[region]
    return own.base + block * own.block_stride_bytes


def test_t01_two_heads_from_one_rank_to_four():
    plan = planned([attention(2)], {"tp": 1, "kv_packing": "packed"}, {"tp": 4, "kv_packing": "packed"})
    assert plan.sources == ((0,), (0,), (0,), (0,))
    assert plan.readers == ((0, 1, 2, 3),)
    found = moved(plan, [(0, [3])], [(0, [5])], 16)
    base = at(plan.source, 0, 0, 3)
    runs = {rank: [(s - base, n) for s, _, n in found[0, rank]] for rank in range(4)}
    assert runs[0] == runs[1]
    assert runs[2] == runs[3]
    assert runs[0] != runs[2]
    half = plan.source.ranks[0].regions[0].block_stride_bytes // 2
    assert all(sum(n for _, n in own) == half for own in runs.values())


@pytest.mark.parametrize(
    "heads, p, d, ratio",
    [(32, 4, 8, 2), (8, 2, 4, 2), (8, 4, 8, 2), (8, 2, 8, 4), (8, 8, 16, 1), (4, 4, 8, 1), (2, 4, 8, 1), (4, 2, 8, 2)],
)
def test_t03_ratio_of_block_lengths(heads, p, d, ratio):
    knobs = {"block_size": 32}
    plan = planned([attention(heads)], {"tp": p, **knobs}, {"tp": d, **knobs})
    ours, theirs = (side.ranks[0].regions[0].block_stride_bytes for side in (plan.source, plan.destination))
    assert ours == ratio * theirs
    if (heads, p, d) == (4, 2, 8):
        assert (ours, theirs) == (8192, 4096)


def test_t04_four_heads_from_eight_ranks_to_one():
    plan = planned([attention(4, 128)], {"tp": 8, "block_size": 256}, {"tp": 1, "block_size": 256})
    sources = plan.sources[0]
    assert [rank // 2 for rank in sources] == [0, 1, 2, 3]
    found = moved(plan, [(0, [2])], [(0, [7])], 256)
    base = at(plan.destination, 0, 0, 7)
    key_runs = [(d - base, n) for rank in sources for _, d, n in found[rank, 0] if 0 <= d - base < 262144]
    assert key_runs == [(0, 65536), (65536, 65536), (131072, 65536), (196608, 65536)]


def test_t04_a_quarter_is_not_enough():
    source, destination = pair([attention(4, 128)], {"tp": 8}, {"tp": 1})
    with pytest.raises(UncoveredError) as error:
        plan_engines(EngineLayout("p", source.ranks[:2]), destination)
    assert (error.value.axis, error.value.interval) == ("kv_head", (1, 4))


def test_t04_reverse():
    plan = planned([attention(4, 128)], {"tp": 2, "block_size": 256}, {"tp": 8, "block_size": 256})
    found = moved(plan, [(0, [0])], [(0, [0])], 256)
    for d in range(8):
        assert plan.sources[d] == (d // 4,)
        first = min(s for s, _, _ in found[d // 4, d]) - at(plan.source, d // 4, 0, 0)
        assert first == (d // 2) % 2 * 65536


@pytest.mark.parametrize("p, d, attention_sources, state_sources", [(2, 1, 2, 2), (4, 1, 2, 4), (4, 2, 1, 2)])
def test_t05_attention_and_state_have_their_own_sources(p, d, attention_sources, state_sources):
    layers = [
        attention(2),
        Mamba2Spec(name="model.layers.1.mixer", group=1, num_heads=8, head_dim=4, state_size=4, num_groups=4),
    ]
    plan = planned(layers, {"tp": p}, {"tp": d})
    sources = [
        sorted({own.source_rank for own in plan.pairs if own.destination_rank == 0
                for part in own.parts if part.source_group == group})
        for group in (0, 1)
    ]  # fmt: skip
    assert [len(own) for own in sources] == [attention_sources, state_sources]
    assert sources[1] == list(range(state_sources))
    if (p, d) == (4, 1):
        assert [rank // 2 for rank in sources[0]] == [0, 1]


def test_t06_latent_rows_are_read_once():
    plan = planned([latent()], {"tp": 8}, {"tp": 1})
    assert len(plan.sources[0]) == 1
    assert sorted(map(len, plan.readers)) == [0] * 7 + [1]
    plan = planned([latent()], {"tp": 2}, {"tp": 8})
    assert all(len(own) == 1 for own in plan.sources)
    assert [len(own) for own in plan.readers] == [4, 4]
    plan = planned([latent()], {"tp": 16}, {"tp": 4})
    for rank in range(4):
        assert plan.sources[rank][0] in range(4 * rank, 4 * rank + 4)
    assert sum(not own for own in plan.readers) == 12


@pytest.mark.parametrize("salt", range(4))
def test_t06_data_parallel_groups_draw_from_their_own_four(salt):
    source, destination = pair([latent()], {"tp": 16}, {"tp": 4})
    plan = plan_engines(source, destination, salt=salt)
    assert all(plan.sources[rank][0] in range(4 * rank, 4 * rank + 4) for rank in range(4))


def test_t07_heads_in_quarters_and_an_indexer_whole():
    keys = IndexerSpec(name="model.layers.0.indexer", head_dim=128, dtype="uint8")
    plan = planned([attention(4), keys], {"tp": 4, "block_size": 256}, {"tp": 1, "block_size": 256})
    assert {side.ranks[0].regions[2].block_stride_bytes for side in (plan.source, plan.destination)} == {32768}
    found = moved(plan, [(0, [1])], [(0, [1])], 256)
    region = plan.destination.ranks[0].regions[2]
    reads = [run for own in found.values() for run in own if region.base <= run[1] < region.base + region.num_bytes]
    assert [n for _, _, n in reads] == [32768]
    heads = [run for own in found.values() for run in own if run not in reads]
    assert len(heads) == 8
    assert len({n for _, _, n in heads}) == 1


def test_t07_heads_called_replicated_are_refused():
    source, destination = pair([attention(4)], {"tp": 4}, {"tp": 1})
    first = source.ranks[0]
    same = [RankLayout(rank.regions, first.components, tp=rank.tp) for rank in source.ranks]
    with pytest.raises(UncoveredError):
        plan_engines(EngineLayout("p", tuple(same)), destination)


def test_t09_nhd_moves_row_by_row():
    knobs = {"block_size": 16, "kv_layout": "NHD", "kv_packing": "split"}
    plan = planned([attention(4, 128)], {"tp": 1, **knobs}, {"tp": 2, **knobs})
    key = plan.source.ranks[0].component("model.layers.0.self_attn", "k").block
    assert key.axis("token").spans[0].stride_bytes == 1024
    found = moved(plan, [(0, [4])], [(0, [9])], 16)
    assert [len(own) for own in found.values()] == [32, 32]
    assert {n for own in found.values() for _, _, n in own} == {512}
    hnd = planned([attention(4, 128)], {"tp": 1, "block_size": 16}, {"tp": 2, "block_size": 16})
    assert [len(own) for own in moved(hnd, [(0, [4])], [(0, [9])], 16).values()] == [2, 2]


def test_t11_logical_and_kernel_pages():
    assert logical_to_kernel_block_ids([[0, 5, 1817]], 2, num_blocks=1818) == [[0, 1, 10, 11, 3634, 3635]]
    knobs = {"block_size": 128, "kernel_block_size": 64, "num_blocks": 1818}
    plan = planned([attention(1)], knobs, knobs)
    found = moved(plan, [(0, [0, 5, 1817])], [(0, [0, 5, 1817])], 384)[0, 0]
    page = 64 * 64 * 2
    base = plan.source.ranks[0].regions[0].base
    pages = {(s - base) // page + i for s, _, n in found for i in range(n // page) if s - base < 3636 * page}
    assert pages == {0, 1, 10, 11, 3634, 3635}
    with pytest.raises(BindError, match="1818"):
        moved(plan, [(0, [1818])], [(0, [0])], 128)


def test_t12_a_page_of_twelve_kernel_blocks():
    knobs = {"block_size": 768, "kernel_block_size": 64}
    plan = planned([latent()], knobs, {"block_size": 64})
    assert plan.source.ranks[0].regions[0].block_stride_bytes == 884736
    found = moved(plan, [(0, [2])], [(0, list(range(0, 24, 2)))], 768)[0, 0]
    base = plan.source.ranks[0].regions[0].base
    assert [(s - base, n) for s, _, n in found] == [(page * 73728, 73728) for page in range(24, 36)]


def test_t12_a_length_above_the_stride_is_refused():
    with pytest.raises(DescriptionError, match=r"884735.*884736"):
        planned([latent()], {"block_size": 768, "block_stride_bytes": 884735}, {})
    region, axis = Region(0, 10, 1000), Axis("byte", (Span(0, 1001, 0, 1),))
    with pytest.raises(BoundsError):
        RankLayout((region,), (ComponentLayout("l", "c", 0, 0, BlockLayout((axis,), 1, "uint8")),))


def test_t12_live_bytes_inside_a_stride():
    block = BlockLayout((Axis("token", (Span(0, 9, 0, 100),)),), 100, "uint8[100]", base_bytes=50, tokens_per_block=9)
    layouts = [
        EngineLayout(name, (RankLayout((Region(base, 10, 1000),), (ComponentLayout("l", "c", 0, 0, block),)),))
        for name, base in (("p", 0), ("d", 50_000))
    ]
    found = moved(plan_engines(*layouts), [(0, [3])], [(0, [3])], 9)
    assert found[0, 0] == [(3050, 53050, 900)]


def test_t14_blocks_that_hold_a_state():
    states = {1: 2134016, 2: 1067008, 4: 533504}
    token_bytes = {tp: max(1, 2 // tp) * 256 for tp in states}
    assert [-(-states[tp] // token_bytes[tp]) for tp in states] == [4168, 4168, 2084]
    blocks = [block_size_for_state(states[tp], token_bytes[tp], alignment=32) for tp in states]
    assert blocks == [4192, 4192, 2112]
    assert [largest_kernel_block(block) for block in [*blocks, 1056, 4176]] == [32, 32, 64, 32, 16]
    assert kernel_pages(540672, 8192) == 66
    with pytest.raises(DescriptionError, match=r"16\.5"):
        kernel_pages(540672, 32768)


@pytest.mark.parametrize("p, d", [(1, 4), (4, 1)])
def test_t14_block_4192_against_2112(p, d):
    layers = [
        attention(2),
        Mamba2Spec(name="model.layers.1.mixer", group=1, num_heads=8, head_dim=4, state_size=4, num_groups=4),
    ]
    blocks = {1: (4192, 32), 4: (2112, 64)}
    sides = [
        {"tp": tp, "block_size": blocks[tp][0], "kernel_block_size": blocks[tp][1], "kv_packing": "packed",
         "shared_regions": True, "num_blocks": 8}
        for tp in (p, d)
    ]  # fmt: skip
    plan = planned(layers, *sides)
    tables = {4192: (0, [3, 4]), 2112: (0, [3, 4, 6])}
    found = moved(plan, [tables[blocks[p][0]], (0, [1])], [tables[blocks[d][0]], (0, [2])], 5000)
    total = sum(n for own in found.values() for _, _, n in own)
    copies = d * max(1, 2 // d)
    state = 8 * 16 * 4 + 3 * 2 * (32 + 2 * 16)
    assert total == 5000 * copies * 2 * 64 * 2 + state


def test_t16_large_pages_to_small_ones():
    knobs = {"kv_packing": "packed", "num_blocks": 200}
    plan = planned([attention(1)], {"block_size": 64, **knobs}, {"block_size": 32, **knobs})
    source, destination = list(range(79)), list(range(158))
    found = moved(plan, [(0, source)], [(0, destination)], 5000)[0, 0]
    assert sum(n for _, _, n in found) == 5000 * 2 * 64 * 2
    last = at(plan.destination, 0, 0, 157)
    assert all(d + n <= last for _, d, n in found)


def test_t18_a_window_group_moves_its_last_blocks():
    layers = [
        attention(1, name="model.layers.0.self_attn"),
        SlidingWindowSpec(name="model.layers.1.self_attn", group=1, num_kv_heads=1, head_dim=64, window=1024),
    ]
    num_tokens = 4000
    ids = list(range(1, 64))
    first = first_kept_token(num_tokens, 1024, 64)
    kept = ids[first // 64 :]
    assert (kept[0], len(kept)) == (47, 17)
    knobs = {"block_size": 64, "kv_packing": "packed"}
    plan = planned(layers, knobs, {**knobs, "kv_layout": "NHD"})
    holes = [-1 if i < first // 64 else block for i, block in enumerate(ids)]
    for window in ((first, kept), (0, holes)):
        found = moved(plan, [(0, ids), window], [(0, ids), (first, kept)], num_tokens)[0, 0]
        region = plan.destination.ranks[0].regions[1]
        window_bytes = sum(n for _, d, n in found if region.base <= d < region.base + region.num_bytes)
        assert window_bytes == (num_tokens - first) * 256
        assert sum(n for _, _, n in found) - window_bytes == num_tokens * 256


def test_t21_a_block_that_prefill_lacks_is_local():
    plan = planned(
        [attention(1)], {"block_size": 64, "kv_packing": "packed"}, {"block_size": 64, "kv_packing": "packed"}
    )
    found = moved(plan, [(0, [5, 9])], [(0, [2, 4, 7])], 128)[0, 0]
    assert [d for _, d, _ in found] == [at(plan.destination, 0, 0, block) for block in (2, 4)]


def test_t29_ids_under_context_parallel():
    source, destination = pair([latent()], {"tp": 4, "dcp": 4}, {"tp": 2, "dcp": 2})
    per_block = source.ranks[0].components[0].block.tokens_per_block
    assert (per_block, -(-100 // per_block)) == (64, 2)
    assert -(-1000 // per_block) - first_kept_token(1000, 128, per_block) // per_block == 3
    plan = plan_engines(source, destination)
    assert plan.sources == ((0, 2), (1, 3))


def test_t29_lookahead_blocks_get_nothing():
    plan = planned([latent()], {"tp": 2, "dcp": 2}, {"tp": 2, "dcp": 2})
    assert plan.destination.ranks[0].components[0].block.tokens_per_block == 32
    found = moved(plan, [(0, [3])], [(0, [6, 7])], 32)
    for rank in range(2):
        start = at(plan.destination, rank, 0, 6)
        assert found[rank, rank] == [(at(plan.source, rank, 0, 3), start, 16 * 1152)]


def test_t29_thirteen_blocks_over_four_ranks():
    plan = planned([latent()], {"tp": 4, "dcp": 4, "dcp_interleave": 16}, {"tp": 1})
    ids = [40, 42, 44, 46]
    found = moved(plan, [(0, ids)], [(80, list(range(10, 18)))], 13 * 16)
    read = {
        rank: sorted(
            ids.index((s - plan.source.ranks[rank].regions[0].base) // (16 * 1152)) for s, _, _ in found[rank, 0]
        )
        for rank in range(4)
    }
    assert read == {0: [2, 3], 1: [1, 2], 2: [1, 2], 3: [1, 2]}


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_t29_fewer_context_ranks_than_tensor_ranks(heads):
    plan = planned([attention(heads)], {"tp": 4, "dcp": 2}, {"tp": 1})
    found = moved(plan, [(0, [1, 2])], [(0, [1, 2, 3, 4])], 50)
    assert sum(n for own in found.values() for _, _, n in own) == 50 * heads * 2 * 64 * 2


def test_t29_context_ranks_must_divide_tensor_ranks():
    with pytest.raises(DescriptionError, match="dcp is 3, tp is 4"):
        planned([attention(4)], {"tp": 4, "dcp": 3}, {"tp": 1})


def layers(count, **more):
    return [attention(more.get("heads", 2), 4, f"model.layers.{i}.self_attn") for i in range(count)]


def test_t30_a_draft_layer_on_one_side():
    draft = attention(2, 4, "draft.layers.0.self_attn", draft=True)
    plan = planned(layers(78), {}, {}, destination_layers=[*layers(78), draft], num_layers=78)
    assert plan.not_moved == (("draft.layers.0.self_attn", "k"), ("draft.layers.0.self_attn", "v"))
    assert sum(len(part.layers) for own in plan.pairs for part in own.parts) == 78


def test_t30_a_draft_layer_has_its_own_heads():
    target, draft = attention(8, 4), attention(2, 16, "draft.layers.0.self_attn", draft=True)
    plan = planned([target, draft], {"tp": 2}, {"tp": 1}, num_layers=1)
    found = moved(plan, [(0, [1])], [(0, [1])], 16)
    for rank in range(2):
        region = plan.source.ranks[rank].regions[2]
        own = [n for s, _, n in found[rank, 0] if region.base <= s < region.base + region.num_bytes]
        assert sum(own) == 16 * 16 * 2


def test_t30_same_count_other_names():
    other = [attention(2, 4, f"model.layers.{i}.attn") for i in range(3)]
    with pytest.raises(MissingLayerError, match="self_attn"):
        planned(layers(3), {}, {}, destination_layers=other)


@pytest.mark.parametrize("stages", [(), (41, 39)])
def test_t33_pipeline_stages_meet_by_layer_name(stages):
    plan = planned(layers(80), {"tp": 2, "pp": 2, "pp_layers": stages}, {"tp": 2})
    split = (stages or (40, 40))[0]
    assert [(rank.pp, rank.tp) for rank in plan.source.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in range(2):
        assert plan.sources[rank] == (rank, 2 + rank)
    names = {own.source_rank: [layer for part in own.parts for layer in part.layers] for own in plan.pairs}
    assert names[0] == [f"model.layers.{i}.self_attn" for i in range(split)]
    assert names[2] == [f"model.layers.{i}.self_attn" for i in range(split, 80)]
    assert plan.source.ranks[2].components[0].layer == f"model.layers.{split}.self_attn"
    assert plan.source.ranks[2].components[0].region == 0


def test_t33_a_missing_layer_is_refused():
    with pytest.raises(PlanError, match=r"model\.layers\.79\.self_attn"):
        planned(layers(79), {"pp": 2}, {}, destination_layers=layers(80), num_layers=80)
