"""Hugging Face configs: layers, names and groups of each family, as vLLM 0.32 has them."""

from __future__ import annotations

import collections
import json

import pytest

from kvplan.errors import DescriptionError, UnsupportedError
from kvplan.layouts.hf_config import model_spec, read_hf_config

ATTENTION = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}
ANY = {"torch_dtype": "bfloat16", **ATTENTION}

CASES = {
    "llama": ({"num_hidden_layers": 4}, {"attention": 4}, 1, "model.layers.0.self_attn.attn"),
    "mistral": ({"num_hidden_layers": 4, "sliding_window": 4096}, {"sliding_window": 4}, 1, None),
    "qwen2": ({"num_hidden_layers": 4, "sliding_window": 4096, "use_sliding_window": False}, {"attention": 4}, 1, None),
    "qwen3": ({"num_hidden_layers": 4, "head_dim": 128}, {"attention": 4}, 1, None),
    "qwen3_moe": ({"num_hidden_layers": 4, "head_dim": 128}, {"attention": 4}, 1, None),
    "gemma2": ({"num_hidden_layers": 6}, {"sliding_window": 3, "attention": 3}, 2, None),
    "gemma3_text": ({"num_hidden_layers": 12}, {"sliding_window": 10, "attention": 2}, 6, None),
    "gpt_oss": ({"num_hidden_layers": 6}, {"sliding_window": 3, "attention": 3}, 2, "model.layers.0.attn.attn"),
    "deepseek_v3": ({"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"mla": 3}, 1, None),
    "deepseek_v32": (
        {"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048},
        {"mla": 3, "indexer": 3}, 1, "model.layers.0.self_attn.attn",
    ),
    "jamba": ({"num_hidden_layers": 16}, {"mamba1": 14, "attention": 2}, 8, "model.layers.0.mixer"),
    "bamba": ({"num_hidden_layers": 8, "attn_layer_indices": [3, 7], **MAMBA2}, {"mamba2": 6, "attention": 2}, 4, None),
    "granitemoehybrid": (
        {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, **MAMBA2},
        {"mamba2": 2, "attention": 2}, 2, "model.layers.0.mixer",
    ),
    "nemotron_h": (
        {"hybrid_override_pattern": "M-M*-M", "mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 8,
         "ssm_state_size": 128, "conv_kernel": 4, "attention_head_dim": 128},
        {"mamba2": 3, "attention": 1}, 4, "model.layers.0.mixer",
    ),
    "falcon_h1": ({"num_hidden_layers": 3, **MAMBA2}, {"mamba2": 3, "attention": 3}, 2, "model.layers.0.attn"),
    "qwen3_next": ({"num_hidden_layers": 8}, {"gdn": 6, "attention": 2}, 4, "model.layers.0.linear_attn"),
    "mamba": ({"num_hidden_layers": 3, "state_size": 16}, {"mamba1": 3}, 1, "backbone.layers.0.mixer"),
    "mamba2": (
        {"num_hidden_layers": 3, "num_heads": 16, "head_dim": 64, "state_size": 128, "n_groups": 8},
        {"mamba2": 3}, 1, "backbone.layers.0.mixer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_layers_and_groups(family):
    fields, kinds, groups, first = CASES[family]
    model = model_spec({"model_type": family, **ANY, **fields})
    assert collections.Counter(layer.kind for layer in model.layers) == kinds
    assert {layer.group for layer in model.layers} == set(range(groups))
    assert model.num_layers == fields.get("num_hidden_layers", 6)
    assert first in {None, model.layers[0].name}


def test_sizes_of_a_group_of_query_heads():
    (layer, *_) = model_spec({"model_type": "llama", "num_hidden_layers": 1, **ANY}).layers
    assert (layer.num_kv_heads, layer.head_dim, layer.dtype) == (4, 64, "bfloat16")


def test_mixers_of_falcon_h1_belong_to_their_decoder_layer():
    model = model_spec({"model_type": "falcon_h1", "num_hidden_layers": 3, **ANY, **MAMBA2})
    assert [(layer.name, layer.index) for layer in model.layers if layer.kind == "mamba2"] == [
        ("model.3.mixer", 0), ("model.4.mixer", 1), ("model.5.mixer", 2),
    ]  # fmt: skip


def test_nemotron_keeps_its_state_in_float32():
    fields = CASES["nemotron_h"][0]
    model = model_spec({"model_type": "nemotron_h", **ANY, **fields})
    assert {layer.ssm_dtype for layer in model.layers if layer.kind == "mamba2"} == {"float32"}


def test_the_language_part_of_a_larger_model():
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6}
    model = model_spec({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text})
    assert model.layers[0].name == "language_model.model.layers.0.self_attn.attn"
    assert (model.layers[0].num_kv_heads, model.layers[0].head_dim) == (4, 256)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_hidden_layers": "4"}, ["num_hidden_layers", "'4'", ":3:"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "from 1 on"]),
        ({"torch_dtype": "float12"}, ["torch_dtype", "float12"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "4 layers"]),
    ],
)
def test_a_bad_config_names_line_and_field(tmp_path, change, words):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4, **ANY} | change, indent=1))
    with pytest.raises(DescriptionError) as error:
        read_hf_config(file)
    for word in words:
        assert word in str(error.value)


def test_an_unknown_family_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match=r"'rwkv'.*llama.*explicit layers"):
        model_spec({"model_type": "rwkv"})


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"model_type": "llama", "model_type": "llama"}'])
def test_what_is_no_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DescriptionError, match=r"config\.json:\d+"):
        read_hf_config(tmp_path)


def test_a_class_name_tells_the_family_where_model_type_is_missing() -> None:
    given = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, **ANY}
    assert model_spec(given).layers == model_spec(given | {"model_type": "qwen3_moe"}).layers


def test_an_unknown_family_names_its_file_and_line(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{\n "model_type": "rwkv"}')
    with pytest.raises(UnsupportedError, match=r"config\.json:2: model_type: 'rwkv' is not known"):
        read_hf_config(tmp_path)
