"""Engine layouts on the wire: exact, compact, and never trusted."""

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.errors import KVPlanError, LimitError, WireError
from kvplan.planner import Axis, BlockLayout, ComponentLayout, EngineLayout, RankLayout, Region, Span
from kvplan.testing.strategies import engine, shapes
from kvplan.wire.codec import encode
from kvplan.wire.fingerprint import layout_digest
from kvplan.wire.layouts import from_body, to_body
from kvplan.wire.messages import Introduce, LayoutBody, Party
from tests.wire.samples import BODY, small_layout


def test_round_trip():
    layout = small_layout()
    assert from_body("decode-0", to_body(layout)) == layout


@settings(max_examples=60, deadline=None)
@given(shapes(max_parallel=5, max_block=24), st.integers(1, 9), st.integers(1, 3))
def test_any_engine_survives_the_wire(shape, total, num_layers):
    layout = engine("e", shape, total, num_layers=num_layers, num_blocks=5, base=4096)
    body = to_body(layout)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=LayoutBody)
    assert from_body("e", again) == layout
    assert layout_digest(again) == layout_digest(body)


def test_64_equal_layers_on_8_ranks_are_one_block_layout_and_few_bytes():
    ranks = []
    for tp in range(8):
        block = BlockLayout(
            (Axis("token", (Span(0, 16, 0, 256),)), Axis("kv_head", (Span(tp, tp + 1),))), 256, "bfloat16[128]", 0, 16
        )
        regions = tuple(Region((1 << 40) + (tp * 128 + i) * (1 << 28), 20_000, 4096) for i in range(128))
        components = tuple(
            ComponentLayout(f"model.layers.{i // 2}.self_attn", "kv"[i % 2], 0, i, block) for i in range(128)
        )
        ranks.append(RankLayout(regions, components, tp=tp))
    layout = EngineLayout("big", tuple(ranks))
    body = to_body(layout)
    assert (len(body.blocks), len(body.axes), len(body.layers)) == (8, 9, 64)
    frame = encode(Introduce(producer=Party("p", 0), engine_id="big", layout=body))
    assert len(frame) < 50 * 8 * 128
    assert from_body("big", body) == layout


def changed(body=BODY, **fields):
    return msgspec.structs.replace(body, **fields)


def with_component(**fields):
    rank = BODY.ranks[0]
    first = msgspec.structs.replace(rank.components[0], **fields)
    rank = msgspec.structs.replace(rank, components=(first, *rank.components[1:]))
    return changed(ranks=(rank, *BODY.ranks[1:]))


def with_region(**fields):
    rank = BODY.ranks[0]
    rank = msgspec.structs.replace(
        rank, regions=(msgspec.structs.replace(rank.regions[0], **fields), *rank.regions[1:])
    )
    return changed(ranks=(rank, *BODY.ranks[1:]))


def with_wrong_axis():
    return changed(blocks=tuple(msgspec.structs.replace(block, axes=(7,)) for block in BODY.blocks))


BAD = {
    "layer index": (lambda: with_component(layer=99), "layer index 99"),
    "component index": (lambda: with_component(component=9), "component index 9"),
    "block index": (lambda: with_component(block=9), "block index 9"),
    "region index": (lambda: with_component(region=2), "region 2 is not in"),
    "axis index": (
        lambda: changed(blocks=tuple(msgspec.structs.replace(b, axes=(7,)) for b in BODY.blocks)),
        "axis index 7",
    ),
    "outside its block": (lambda: with_component(base_bytes=262), "block stride is"),
    "before its block": (lambda: with_component(base_bytes=-1), "block stride is"),
    "aliasing layers": (lambda: with_component(region=1), "both lie at byte"),
    "no blocks": (lambda: with_region(num_blocks=0), "num_blocks is 0"),
    "stride too small": (lambda: with_region(block_stride_bytes=100), "block stride is"),
    "past the address space": (lambda: with_region(base=(1 << 63) - 100), "leaves the address space"),
    "same place twice": (lambda: changed(ranks=(BODY.ranks[0], BODY.ranks[0])), "two ranks at"),
}


@pytest.mark.parametrize("name", BAD)
def test_f16_a_layout_that_does_not_hold_together_is_refused(name):
    body, words = BAD[name]
    with pytest.raises(WireError, match=words):
        from_body("liar", body())


def test_the_work_of_validation_is_bounded():
    huge = tuple(
        msgspec.structs.replace(axis, spans=(msgspec.structs.replace(axis.spans[0], start=0, stop=1 << 30),))
        for axis in BODY.axes
    )
    with pytest.raises(LimitError, match="coordinates"):
        from_body("liar", changed(axes=huge))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_numbers_in_a_layout_raise_nothing_but_errors_of_ours(data):
    number = st.one_of(st.integers(-4, 70), st.sampled_from([1 << 20, 1 << 40, (1 << 62) - 1]))
    rank = data.draw(st.integers(0, 1))
    kind = data.draw(st.sampled_from(["span", "region", "component", "block"]))
    ranks, axes, blocks = list(BODY.ranks), list(BODY.axes), list(BODY.blocks)
    if kind == "span":
        field = data.draw(st.sampled_from(["start", "stop", "offset_bytes", "stride_bytes"]))
        i = data.draw(st.integers(0, len(axes) - 1))
        span = msgspec.structs.replace(axes[i].spans[0], **{field: data.draw(number)})
        axes[i] = msgspec.structs.replace(axes[i], spans=(span,))
    elif kind == "region":
        field = data.draw(st.sampled_from(["base", "num_blocks", "block_stride_bytes"]))
        region = msgspec.structs.replace(ranks[rank].regions[0], **{field: abs(data.draw(number))})
        ranks[rank] = msgspec.structs.replace(ranks[rank], regions=(region, *ranks[rank].regions[1:]))
    elif kind == "component":
        field = data.draw(st.sampled_from(["base_bytes", "group", "region", "block"]))
        item = msgspec.structs.replace(ranks[rank].components[0], **{field: abs(data.draw(number))})
        ranks[rank] = msgspec.structs.replace(ranks[rank], components=(item, *ranks[rank].components[1:]))
    else:
        field = data.draw(st.sampled_from(["atom_bytes", "tokens_per_block"]))
        blocks[0] = msgspec.structs.replace(blocks[0], **{field: abs(data.draw(number))})
    body = changed(ranks=tuple(ranks), axes=tuple(axes), blocks=tuple(blocks))
    try:
        layout = from_body("e", body)
    except KVPlanError:
        return
    assert dataclasses.is_dataclass(layout)
