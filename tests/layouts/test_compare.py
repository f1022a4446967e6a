"""T48: what must match is named with both values; what may differ is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.layouts import AttentionSpec, IndexerSpec, LatentSpec, Mamba2Spec
from kvplan.layouts.compare import differences
from kvplan.planner import plan_engines
from tests.layouts.engines import pair

ATTENTION = AttentionSpec(name="model.layers.0.self_attn", num_kv_heads=8, head_dim=128)
LATENT = LatentSpec(name="model.layers.0.self_attn", latent_dim=576)
STATE = Mamba2Spec(name="model.layers.0.mixer", num_heads=8, head_dim=4, state_size=4, num_groups=2)
KEYS = IndexerSpec(name="model.layers.0.indexer", head_dim=128, quant_block_size=128)


@pytest.mark.parametrize(
    "ours, theirs, field, values",
    [
        (ATTENTION, replace(ATTENTION, num_kv_heads=4), "k kv_head", ("[0, 8)", "[0, 4)")),
        (ATTENTION, replace(ATTENTION, num_kv_heads=16), "k kv_head", ("[0, 8)", "[0, 16)")),
        (ATTENTION, replace(ATTENTION, head_dim=64), "k elements of a row", ("128", "64")),
        (ATTENTION, replace(ATTENTION, dtype="float16"), "k dtype", ("bfloat16", "float16")),
        (LATENT, replace(LATENT, latent_dim=512), "latent elements of a row", ("576", "512")),
        (STATE, replace(STATE, num_groups=4), "conv.b channel", ("[0, 8)", "[0, 16)")),
        (STATE, replace(STATE, conv_kernel=3), "conv.b width", ("[-3, 0)", "[-2, 0)")),
        (STATE, replace(STATE, ssm_dtype="bfloat16"), "ssm dtype", ("float32", "bfloat16")),
        (ATTENTION, replace(ATTENTION, name="model.layers.0.attn"), "component k", ("present", "missing")),
        (ATTENTION, LATENT, "component k", ("present", "missing")),
        (KEYS, replace(KEYS, quant_block_size=None), "component indexer_scale", ("present", "missing")),
    ],
)
def test_t48_what_must_match(ours, theirs, field, values):
    source, destination = pair([ours], {"tp": 2}, {"tp": 1}, destination_layers=[theirs])
    found = differences(source, destination)
    first = next(item for item in found if item.field.startswith(field))
    assert (first.ours, first.theirs) == values
    assert first.advice
    assert "model.layers.0" in first.field


@pytest.mark.parametrize(
    "source, destination, field",
    [
        ({"dtype": "float8_e4m3fn"}, {}, "k dtype"),
        ({"dtype": "float8_e4m3fn"}, {"dtype": "float8_e5m2"}, "k dtype"),
        ({"scales": "beside"}, {}, "component k_scale"),
        ({"scales": "beside"}, {"scales": "inside", "scale_dtype": "bfloat16"}, "k_scale dtype"),
    ],
)
def test_t48_cache_formats_must_match(source, destination, field):
    found = differences(*pair([ATTENTION], source, destination))
    assert any(item.field.startswith(field) for item in found)


def test_t48_one_line_for_many_layers():
    layers = [replace(ATTENTION, name=f"model.layers.{i}.self_attn") for i in range(80)]
    others = [replace(layer, num_kv_heads=4) for layer in layers]
    found = differences(*pair(layers, {}, {}, destination_layers=others))
    assert [item.field for item in found] == [
        f"{name} kv_head (80 layers, first model.layers.0.self_attn)" for name in ("k", "v")
    ]


@pytest.mark.parametrize(
    "source, destination",
    [
        ({"tp": 4}, {"tp": 3}),
        ({"block_size": 48}, {"block_size": 32}),
        ({"num_blocks": 100}, {"num_blocks": 200}),
        ({"kv_layout": "NHD"}, {"kv_layout": "TRANSPOSED"}),
        ({"kv_packing": "split"}, {"kv_packing": "blocks_first"}),
        ({"tp": 4, "dcp": 2, "dcp_interleave": 4}, {"tp": 2, "dcp": 2, "dcp_interleave": 1}),
        ({"scales": "beside"}, {"scales": "inside"}),
        ({"block_stride_bytes": 1 << 20}, {}),
        ({"block_size": 64, "kernel_block_size": 16}, {"block_size": 64}),
    ],
)
def test_t48_what_may_differ(source, destination):
    sides = pair([ATTENTION], source, destination)
    assert differences(*sides) == ()
    assert plan_engines(*sides).pairs


def test_a_draft_layer_may_be_missing_but_not_differ():
    draft = AttentionSpec(name="draft.0.attn", num_kv_heads=2, head_dim=64, draft=True)
    assert differences(*pair([ATTENTION, draft], {}, {}, destination_layers=[ATTENTION], num_layers=1)) == ()
    other = [ATTENTION, replace(draft, num_kv_heads=4)]
    found = differences(*pair([ATTENTION, draft], {}, {}, destination_layers=other, num_layers=1))
    assert [item.field for item in found] == ["k kv_head (layer draft.0.attn)", "v kv_head (layer draft.0.attn)"]
