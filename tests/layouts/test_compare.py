"""T48: what must match is named with both values; what may differ is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.layouts import AttentionSpec, EngineSpec, IndexerSpec, LatentSpec, Mamba2Spec
from kvplan.layouts.compare import differences, model_differences
from kvplan.layouts.hf_config import model_spec
from kvplan.planner import plan_engines
from tests.layouts.engines import pair

ATTENTION = AttentionSpec(name="model.layers.0.self_attn", num_kv_heads=8, head_dim=128)
LATENT = LatentSpec(name="model.layers.0.self_attn", latent_dim=576)
STATE = Mamba2Spec(name="model.layers.0.mixer", num_heads=8, head_dim=4, state_size=4, num_groups=2)
KEYS = IndexerSpec(name="model.layers.0.indexer", head_dim=128, quant_block_size=128)


def test_every_field_that_differs_is_named_not_only_the_first():
    theirs = replace(ATTENTION, dtype="float16", num_kv_heads=4, head_dim=64)
    found = differences(*pair([ATTENTION], {"tp": 2}, {"tp": 1}, destination_layers=[theirs]))
    assert {item.field.partition(" ")[0] for item in found} == {"dtype", "num_kv_heads", "head_dim"}


def test_a_row_counted_in_bytes_has_no_length_to_compare():
    theirs = replace(LATENT, dtype="fp8_ds_mla")
    found = differences(*pair([LATENT], {"tp": 2}, {"tp": 1}, destination_layers=[theirs]))
    assert [item.field.partition(" ")[0] for item in found] == ["dtype"]


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8}


@pytest.mark.parametrize(
    "change, fields",
    [
        ({}, []),
        ({"_name_or_path": "elsewhere", "transformers_version": "9", "torch_dtype": "float16"}, []),
        ({"rms_norm_eps": 1e-6}, []),
        ({"rope_theta": 500000.0}, ["model.rope_theta"]),
        ({"model_type": "mistral", "vocab_size": 200}, ["model.model_type", "model.vocab_size"]),
    ],
)
def test_equal_geometry_does_not_make_one_model(change, fields):
    both = [
        LLAMA | {"rope_theta": 10000.0, "vocab_size": 100},
        LLAMA | {"rope_theta": 10000.0, "vocab_size": 100} | change,
    ]
    specs = []
    for data in both:
        model = model_spec(data)
        specs.append(EngineSpec(engine_id="e", layers=model.layers, num_layers=2, identity=model.identity))
    found = model_differences(*specs)
    assert [item.field for item in found] == fields
    assert all(item.ours != item.theirs for item in found)


@pytest.mark.parametrize(
    "ours, theirs, field, values",
    [
        (ATTENTION, replace(ATTENTION, num_kv_heads=4), "num_kv_heads (k, v of", ("8", "4")),
        (ATTENTION, replace(ATTENTION, num_kv_heads=16), "num_kv_heads (k, v of", ("8", "16")),
        (ATTENTION, replace(ATTENTION, head_dim=64), "head_dim (k, v of", ("128", "64")),
        (ATTENTION, replace(ATTENTION, dtype="float16"), "dtype (k, v of", ("bfloat16", "float16")),
        (LATENT, replace(LATENT, latent_dim=512), "latent_dim (latent of", ("576", "512")),
        (STATE, replace(STATE, num_groups=4), "channels (conv.b, conv.c of", ("8", "16")),
        (STATE, replace(STATE, conv_kernel=3), "conv_kernel (conv.x, conv.b, conv.c of", ("4", "3")),
        (STATE, replace(STATE, num_heads=16), "num_heads (ssm of", ("8", "16")),
        (STATE, replace(STATE, ssm_dtype="bfloat16"), "dtype (ssm of", ("float32", "bfloat16")),
        (
            ATTENTION,
            replace(ATTENTION, name="model.layers.0.attn"),
            "layer model.layers.0.self",
            ("present", "missing"),
        ),
        (ATTENTION, LATENT, "component k (layer", ("present", "missing")),
        (KEYS, replace(KEYS, quant_block_size=None), "component indexer_scale (", ("present", "missing")),
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
        ({"dtype": "float8_e4m3fn"}, {}, "dtype (k, v of"),
        ({"dtype": "float8_e4m3fn"}, {"dtype": "float8_e5m2"}, "dtype (k, v of"),
        ({"scales": "beside"}, {}, "component k_scale ("),
        ({"scales": "beside"}, {"scales": "inside", "scale_dtype": "bfloat16"}, "dtype (k_scale, v_scale of"),
    ],
)
def test_t48_cache_formats_must_match(source, destination, field):
    found = differences(*pair([ATTENTION], source, destination))
    assert any(item.field.startswith(field) for item in found)


def test_t48_one_line_for_many_layers():
    layers = [replace(ATTENTION, name=f"model.layers.{i}.self_attn") for i in range(80)]
    others = [replace(layer, num_kv_heads=4) for layer in layers]
    found = differences(*pair(layers, {}, {}, destination_layers=others))
    assert [item.field for item in found] == ["num_kv_heads (k, v of 80 layers, first model.layers.0.self_attn)"]


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
    assert [item.field for item in found] == ["num_kv_heads (k, v of layer draft.0.attn)"]
