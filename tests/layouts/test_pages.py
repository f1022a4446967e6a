"""What each kind keeps, byte by byte, in the orders that engines use; tensors of numpy are the yardstick."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvplan.errors import DescriptionError
from kvplan.layouts import (
    AddressSpace,
    AttentionSpec,
    CacheGeometry,
    GdnSpec,
    GroupGeometry,
    IndexerSpec,
    LatentSpec,
    Mamba1Spec,
    Mamba2Spec,
    Parallel,
)
from kvplan.layouts.hybrid import block_size_for_state
from kvplan.layouts.parallel import Place, even_stages, held
from tests.layouts.engines import engine

HEADS, DIM, TOKENS, KERNEL = 3, 5, 8, 4
LAYER = AttentionSpec(name="l.0", num_kv_heads=HEADS, head_dim=DIM, dtype="uint8")


def offset(component, **coordinates):
    axes = {axis.name: axis for axis in component.block.axes}
    total = component.block.base_bytes
    for name, x in coordinates.items():
        span = next(s for s in axes[name].spans if s.start <= x < s.stop)
        total += span.at(x)
    return total


def rank(layer, **knobs):
    return engine("e", [layer], space=AddressSpace(), **knobs).ranks[0]


def expected(layout, packing):
    """Return (K offsets, V offsets), both (token, head, dim), from strides of a real array of one block."""
    kernels = TOKENS // KERNEL
    numbers = np.arange(2 * kernels * HEADS * KERNEL * DIM)
    if packing == "split":
        numbers = np.concatenate([np.arange(kernels * HEADS * KERNEL * DIM)] * 2)
        halves = numbers.reshape(2, kernels, -1)
    elif packing == "interleaved" and layout == "TRANSPOSED":
        both = numbers.reshape(kernels, HEADS, 2, KERNEL * DIM)
        key = both[:, :, 0].reshape(kernels, HEADS, DIM, KERNEL).transpose(0, 3, 1, 2)
        value = both[:, :, 1].reshape(kernels, HEADS, KERNEL, DIM).transpose(0, 2, 1, 3)
        return key.reshape(TOKENS, HEADS, DIM), value.reshape(TOKENS, HEADS, DIM)
    elif packing == "interleaved":
        shape = (kernels, KERNEL, HEADS, 2, DIM) if layout == "NHD" else (kernels, HEADS, KERNEL, 2, DIM)
        both = numbers.reshape(shape)
        if layout != "NHD":
            both = both.transpose(0, 2, 1, 3, 4)
        return both[..., 0, :].reshape(TOKENS, HEADS, DIM), both[..., 1, :].reshape(TOKENS, HEADS, DIM)
    else:
        halves = numbers.reshape(kernels, 2, -1).transpose(1, 0, 2)
    shapes = {"HND": (HEADS, KERNEL, DIM), "NHD": (KERNEL, HEADS, DIM), "TRANSPOSED": (HEADS, DIM, KERNEL)}
    orders = {"HND": (0, 2, 1, 3), "NHD": (0, 1, 2, 3), "TRANSPOSED": (0, 3, 1, 2)}
    value_layout = "HND" if layout == "TRANSPOSED" else layout
    return tuple(
        half.reshape(kernels, *shapes[own]).transpose(orders[own]).reshape(TOKENS, HEADS, DIM)
        for half, own in ((halves[0], layout), (halves[1], value_layout))
    )


@pytest.mark.parametrize("layout", ["HND", "NHD", "TRANSPOSED"])
@pytest.mark.parametrize("packing", ["split", "packed", "interleaved", "blocks_first"])
def test_attention_lies_as_the_array_does(layout, packing):
    own = rank(LAYER, block_size=TOKENS, kernel_block_size=KERNEL, kv_layout=layout, kv_packing=packing)
    for component, wanted in zip(own.components, expected(layout, packing), strict=True):
        for token in range(TOKENS):
            for head in range(HEADS):
                for dim in range(DIM):
                    column = component.block.axis("head_dim") is not None
                    place = {"token": token, "kv_head": head, **({"head_dim": dim} if column else {})}
                    got = offset(component, **place) + (0 if column else dim)
                    assert got == wanted[token, head, dim]
    total = sum(region.block_stride_bytes for region in own.regions)
    assert total == 2 * HEADS * DIM * TOKENS


def test_the_example_of_the_design():
    layer = AttentionSpec(name="l.0", num_kv_heads=8, head_dim=128)
    knobs = {"block_size": 32, "kernel_block_size": 16, "kv_layout": "NHD", "kv_packing": "packed"}
    own = engine("e", [layer], space=AddressSpace(), tp=2, **knobs).ranks[1]
    (region,), key = own.regions, own.components[0]
    assert (region.block_stride_bytes, key.block.atom_bytes, key.block.format) == (65536, 256, "bfloat16[128]")
    assert [(s.start, s.stop, s.offset_bytes, s.stride_bytes) for s in key.block.axis("token").spans] == [
        (0, 16, 0, 1024), (16, 32, 32768, 1024),
    ]  # fmt: skip
    assert [(s.start, s.stop, s.offset_bytes, s.stride_bytes) for s in key.block.axis("kv_head").spans] == [
        (4, 8, 0, 256)
    ]


def test_scales_beside_and_inside():
    knobs = {"block_size": 4, "kv_packing": "packed", "dtype": "float8_e4m3fn"}
    beside = rank(LAYER, scales="beside", **knobs)
    parts = {item.component: item for item in beside.components}
    assert set(parts) == {"k", "v", "k_scale", "v_scale"}
    rows = 4 * HEADS
    assert offset(parts["k_scale"], token=0, kv_head=0) == 2 * rows * DIM
    assert offset(parts["v_scale"], token=0, kv_head=0) == 2 * rows * DIM + rows * 4
    assert beside.regions[0].block_stride_bytes == 2 * rows * (DIM + 4)
    inside = {item.component: item for item in rank(LAYER, scales="inside", **knobs).components}
    assert offset(inside["k_scale"], token=1, kv_head=0) == offset(inside["k"], token=1, kv_head=0) + DIM
    with pytest.raises(DescriptionError, match="TRANSPOSED"):
        CacheGeometry(scales="inside", kv_layout="TRANSPOSED")


def test_blocks_first_puts_the_kernel_block_outermost():
    layers = [AttentionSpec(name=f"l.{i}", num_kv_heads=1, head_dim=4, dtype="uint8") for i in range(3)]
    knobs = {"block_size": 4, "kernel_block_size": 2, "kv_packing": "blocks_first"}
    own = engine("e", layers, space=AddressSpace(), **knobs).ranks[0]
    assert [region.block_stride_bytes for region in own.regions] == [3 * 2 * 4 * 4]
    key = own.component("l.1", "k")
    assert offset(key, token=0, kv_head=0) == 16
    assert offset(key, token=2, kv_head=0) == 16 + 48


def test_rows_and_indexer_keys():
    own = rank(LatentSpec(name="l.0", latent_dim=576), block_size=64)
    assert own.components[0].block.format == "bfloat16[576]"
    assert own.regions[0].block_stride_bytes == 64 * 1152
    own = rank(LatentSpec(name="l.0", latent_dim=576), block_size=64, dtype="fp8_ds_mla")
    assert own.components[0].block.atom_bytes == 656
    keys = rank(IndexerSpec(name="l.0", head_dim=128, quant_block_size=128), block_size=64)
    assert keys.regions[0].block_stride_bytes == 64 * 132
    assert offset(keys.components[1], token=1) == 64 * 128 + 4


@pytest.mark.parametrize("order", ["SD", "DS"])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_mamba2_state(order, tp_rank):
    layer = Mamba2Spec(name="l.0", num_heads=4, head_dim=3, state_size=5, num_groups=1, dtype="uint8")
    own = engine("e", [layer], space=AddressSpace(), tp=2, conv_layout=order).ranks[tp_rank]
    x, b, c, ssm = own.components
    channels, width = 6 + 5 + 5, 3
    array = np.arange(channels * width)
    place = array.reshape(width, channels).T if order == "SD" else array.reshape(channels, width)
    for first, component, start, count in ((0, x, 6 * tp_rank, 6), (6, b, 0, 5), (11, c, 0, 5)):
        for channel in range(count):
            for back in range(-3, 0):
                got = offset(component, channel=start + channel, width=back)
                assert got == place[first + channel, back + 3]
    assert offset(ssm, state_head=2 * tp_rank + 1) == 48 + 3 * 5 * 4
    assert own.regions[0].block_stride_bytes == 48 + 2 * 3 * 5 * 4


def test_groups_are_repeated_when_there_are_more_ranks():
    layer = Mamba2Spec(name="l.0", num_heads=8, head_dim=2, state_size=4, num_groups=2)
    own = engine("e", [layer], space=AddressSpace(), tp=4).ranks
    spans = [r.component("l.0", "conv.b").block.axis("channel").spans[0] for r in own]
    assert [(s.start, s.stop) for s in spans] == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_mamba1_and_delta_net_state():
    own = rank(Mamba1Spec(name="l.0", intermediate_size=8, state_size=4, dtype="bfloat16", ssm_dtype="float32"))
    assert own.regions[0].block_stride_bytes == 8 * 3 * 2 + 8 * 4 * 4
    layer = GdnSpec(name="l.0", num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=16)
    own = engine("e", [layer], space=AddressSpace(), tp=2).ranks[1]
    q, k, v, ssm = own.components
    assert [(s.start, s.stop) for s in (p.block.axis("channel").spans[0] for p in (q, k, v))] == [
        (8, 16), (8, 16), (32, 64),
    ]  # fmt: skip
    assert ssm.block.format == "bfloat16[128]"
    assert own.regions[0].block_stride_bytes == (8 + 8 + 32) * 3 * 2 + 2 * 128 * 2


def test_state_shares_the_attention_page():
    layers = [
        AttentionSpec(name="l.0", num_kv_heads=2, head_dim=8),
        Mamba2Spec(name="l.1", group=1, num_heads=2, head_dim=4, state_size=4),
        Mamba2Spec(name="l.2", group=2, num_heads=2, head_dim=4, state_size=4),
    ]
    own = engine("e", layers, space=AddressSpace(), shared_regions=True, kv_packing="packed", block_size=16).ranks[0]
    assert [region.block_stride_bytes for region in own.regions] == [2 * 2 * 8 * 2 * 16]
    assert {item.region for item in own.components} == {0}
    apart = engine("e", layers, space=AddressSpace(), kv_packing="packed", block_size=16).ranks[0]
    assert len(apart.regions) == 3


def test_each_group_has_its_own_blocks():
    layers = [LAYER, AttentionSpec(name="l.1", group=1, num_kv_heads=1, head_dim=4)]
    own = engine("e", layers, space=AddressSpace(), block_size=16, groups=(GroupGeometry(1, 48, 16),)).ranks[0]
    assert {item.group: item.block.tokens_per_block for item in own.components} == {0: 16, 1: 48}


def test_interleaved_tokens_of_context_ranks():
    for place in range(4):
        own = engine("e", [LAYER], space=AddressSpace(), tp=4, dcp=4, dcp_interleave=2, block_size=4).ranks[place]
        spans = own.components[0].block.axis("token").spans
        tokens = [t for s in spans for t in range(s.start, s.stop)]
        assert tokens == [t for t in range(16) if t // 2 % 4 == place]
        assert [offset(own.components[0], token=t, kv_head=0) // DIM for t in tokens] == [0, 1, 2, 3]


def test_shares_cover_everything_and_are_vllms_where_it_has_any():
    for parts in range(1, 33):
        for count in range(1, 33):
            shares = [held(rank, parts, count) for rank in range(parts)]
            assert set().union(*(set(range(*share)) for share in shares)) == set(range(count))
            if count % parts == 0:
                assert shares == [(r * count // parts, (r + 1) * count // parts) for r in range(parts)]
            elif parts % count == 0:
                assert shares == [(r // (parts // count), r // (parts // count) + 1) for r in range(parts)]


@pytest.mark.parametrize("layers, stages, counts", [(61, 4, (15, 15, 16, 15)), (80, 2, (40, 40)), (7, 4, (2, 2, 2, 1))])
def test_stages_as_vllm_cuts_them(layers, stages, counts):
    assert even_stages(layers, stages) == counts


def test_ranks_are_counted_stage_by_stage():
    places = list(Parallel(tp=2, pp=2, dcp=2).places())
    assert places == [Place(0, 0, 2, 2), Place(1, 0, 2, 2), Place(0, 1, 2, 2), Place(1, 1, 2, 2)]
    assert [place.dcp_rank for place in places] == [0, 1, 0, 1]


def test_addresses_are_disjoint_over_both_sides():
    space = AddressSpace()
    sides = [engine(name, [LAYER], space=space, tp=3) for name in "pd"]
    spans = sorted((r.base, r.base + r.num_bytes) for side in sides for own in side.ranks for r in own.regions)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


def test_a_granite_hybrid_page_as_measured_on_vllm():
    """vLLM 0.32 on CPU: convolution (3, 640) bfloat16, state (16, 32, 64) float32, block 384, stride 196608."""
    layers = [
        AttentionSpec(name="l.1", num_kv_heads=4, head_dim=32),
        Mamba2Spec(name="l.0", group=1, num_heads=16, head_dim=32, state_size=64, ssm_dtype="float32"),
    ]
    state = 3 * 640 * 2 + 16 * 32 * 64 * 4
    assert state == 134912
    block = block_size_for_state(state, 4 * 32 * 2 * 2, alignment=128)
    assert block == 384
    knobs = {"block_size": block, "kv_packing": "interleaved", "kv_layout": "TRANSPOSED", "shared_regions": True}
    own = engine("e", layers, space=AddressSpace(), **knobs).ranks[0]
    assert [region.block_stride_bytes for region in own.regions] == [196608]
    ssm = own.component("l.0", "ssm").block
    assert (ssm.base_bytes, ssm.atom_bytes, ssm.format) == (3840, 8192, "float32[2048]")
