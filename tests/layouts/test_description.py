"""Descriptions: what is read, what is refused with line and field, and that what is written reads back."""

from __future__ import annotations

import pytest
import yaml

from kvplan.errors import DescriptionError
from kvplan.layouts import AttentionSpec, Mamba2Spec, Parallel, SlidingWindowSpec, engine_layout
from kvplan.layouts.description import read_description, write_description
from tests.cli import random_pairs

EXAMPLE = """\
engine_id: prefill-0
model: {layers: [{name: "model.layers.{0..31}.self_attn", kind: attention, group: 0,
                  num_kv_heads: 8, head_dim: 128, dtype: bfloat16}]}
parallel: {tp: 4, pp: 1, dcp: 1, dcp_interleave: 1}
cache: {block_size: 32, kernel_block_size: 16, num_blocks: 1000, kv_layout: HND, kv_packing: split}
"""


def read(tmp_path, text):
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    return read_description(file)


def test_the_example_of_the_design(tmp_path):
    spec = read(tmp_path, EXAMPLE)
    assert (spec.engine_id, len(spec.layers), spec.num_layers, spec.num_groups) == ("prefill-0", 32, 32, 1)
    assert spec.layers[31] == AttentionSpec(name="model.layers.31.self_attn", num_kv_heads=8, head_dim=128)
    assert spec.parallel == Parallel(tp=4)
    layout = engine_layout(spec)
    assert len(layout.ranks) == 4
    assert len(layout.ranks[0].regions) == 64
    assert layout.ranks[3].components[0].block.axis("kv_head").spans[0].start == 6


@pytest.mark.parametrize("word", ["hnd", "HND", "Hnd"])
@pytest.mark.parametrize("packing", ["blocks_first", "Blocks-First", "BLOCKS_FIRST"])
def test_words_in_any_case_with_hyphens(tmp_path, word, packing):
    text = EXAMPLE.replace("HND", word).replace("split", packing).replace("kind: attention", "kind: Attention")
    spec = read(tmp_path, text)
    assert (spec.cache.kv_layout, spec.cache.kv_packing) == ("HND", "blocks_first")


@pytest.mark.parametrize(
    "old, new, line, words",
    [
        ("block_size: 32,", "blok_size: 32,", 5, ["blok_size", "did you mean block_size", "kv_layout"]),
        ("HND", "HDN", 5, ["cache.kv_layout", "'HDN'", "HND, NHD, TRANSPOSED"]),
        ("tp: 4", "tp: 0", 4, ["parallel.tp", "0", "from 1 on"]),
        ("tp: 4", "tp: four", 4, ["parallel.tp", "'four'", "whole number"]),
        ("tp: 4", "tp: -4", 4, ["parallel.tp", "-4"]),
        ("kind: attention", "kind: atention", 2, ["model.layers.0.kind", "atention", "sliding_window", "gdn"]),
        ("num_kv_heads: 8", "num_heads: 8", 3, ["num_heads", "num_kv_heads"]),
        ("num_kv_heads: 8, ", "", 2, ["model.layers.0", "num_kv_heads must be given"]),
        ("dtype: bfloat16", "dtype: bflot16", 3, ["model.layers.0.dtype", "bflot16", "float8_e4m3fn"]),
        ("{0..31}", "{31..0}", 2, ["model.layers.0.name", "31..0"]),
        ("{0..31}", "{0..}", 2, ["model.layers.0.name"]),
        ("{0..31}", "{0..10000000000}", 2, ["model.layers.0.name", "more than 100000 layers"]),
        ("num_blocks: 1000", "num_blocks: 1000000000000000000", 5, ["63 bits", "lower num_blocks"]),
        ("num_blocks: 1000", "num_blocks: 1.5", 5, ["cache.num_blocks: 1.5", "whole number"]),
        ("num_blocks: 1000", "num_blocks: null", 5, ["cache.num_blocks: null", "whole number"]),
        ("num_blocks: 1000", "num_blocks: 10\x00", 5, ["character 0 is not allowed"]),
        ("kernel_block_size: 16", "kernel_block_size: 12", 5, ["kernel_block_size is 12", "block_size is 32"]),
        ("dcp: 1", "dcp: 3", 4, ["parallel.dcp", "dcp is 3", "tp is 4"]),
        ("dcp: 1, dcp_interleave: 1", "dcp: 2, dcp_interleave: 5", 4, ["dcp_interleave is 5", "block_size is 32"]),
        ("pp: 1", "pp: 33", 4, ["pp is 33", "32 layers"]),
        ("pp: 1", "pp: 2, pp_layers: [30, 3]", 4, ["pp_layers", "33", "32"]),
        ("group: 0", "group: 1", 2, ["groups are [1]"]),
        ("engine_id: prefill-0", "engine: prefill-0", 1, ["'engine'", "engine_id"]),
        ("cache: {", "cache: {scales: outside, ", 5, ["cache.scales", "none, beside, inside"]),
        ("cache: {", "cache: {block_size: 4, ", 5, ["given twice"]),
        ("cache: {", "cache: {groups: {1: {block_size: 8}}, ", 5, ["cache.groups", "[1]"]),
        ("parallel: {", "parallel: [", 4, ["not YAML"]),
        ("tp: 4", "tp: 4000000", 4, ["parallel.tp", "4096 ranks"]),
        ("block_size: 32", "block_size: 1000000000", 5, ["cache.block_size", "at most"]),
    ],
)
def test_a_bad_file_is_refused_with_line_and_field(tmp_path, old, new, line, words):
    assert old in EXAMPLE
    with pytest.raises(DescriptionError) as error:
        engine_layout(read(tmp_path, EXAMPLE.replace(old, new, 1)))
    message = str(error.value)
    for word in words:
        assert word in message
    if error.value.file:
        assert f"engine.yaml:{line}:" in message


@pytest.mark.parametrize("text", ["", "[]", "model: 3", "engine_id: x", "model: {}", "\x00", "model: {layers: 3}"])
def test_nonsense_is_refused(tmp_path, text):
    with pytest.raises(DescriptionError, match=r"engine\.yaml"):
        read(tmp_path, text)


def test_an_empty_file_is_called_so(tmp_path):
    with pytest.raises(DescriptionError, match=r"engine\.yaml:1: the file is empty"):
        read(tmp_path, "# nothing yet\n")


def test_own_keys_win_over_merged_ones(tmp_path):
    base = "cache: &base {block_size: 64, num_blocks: 10}"
    text = EXAMPLE.replace("cache: {", f"cache: {{<<: {base.partition('&base ')[2]}, ")
    assert read(tmp_path, text) == read(tmp_path, EXAMPLE)
    with pytest.raises(DescriptionError, match="'tp' is given twice"):
        read(tmp_path, EXAMPLE.replace("tp: 4", "<<: {pp: 2}, tp: 4, tp: 2"))


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    assert read(tmp_path, f"\ufeff{EXAMPLE}") == read(tmp_path, EXAMPLE)


def test_a_model_config_that_is_not_there_names_the_field(tmp_path):
    with pytest.raises(DescriptionError, match=r"engine\.yaml:1: model\.hf_config: .*nope\.json' is not there"):
        read(tmp_path, "model: {hf_config: nope.json}")


def test_aliases_cannot_unfold_without_end(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    for text in ("\n".join(lines), "a: &a [*a]"):
        with pytest.raises(DescriptionError, match="not YAML"):
            read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DescriptionError, match=r"none\.yaml.*cannot be read"):
        read_description(tmp_path / "none.yaml")


def test_state_and_tokens_do_not_share_a_group(tmp_path):
    state = '{name: "model.layers.40.mixer", kind: mamba2, num_heads: 4, head_dim: 4, state_size: 4}'
    with pytest.raises(DescriptionError, match="group 0 mixes attention, mamba2"):
        read(tmp_path, EXAMPLE.replace("dtype: bfloat16}", f"dtype: bfloat16}}, {state}"))


def test_every_kind_with_the_names_of_the_field(tmp_path):
    spec = read(
        tmp_path,
        """\
model:
  dtype: float16
  layers:
    - {name: "l.0.a", kind: attention, num_kv_heads: 2, head_size: 8}
    - {name: "l.1.a", kind: sliding-window, group: 1, num_kv_heads: 2, head_dim: 8, sliding_window: 64}
    - {name: "l.2.a", kind: mla, group: 2, latent_dim: 576}
    - {name: "l.2.i", kind: indexer, group: 2, head_dim: 128, quant_block_size: 128}
    - {name: "l.3.m", kind: mamba1, group: 3, intermediate_size: 32, d_state: 4, d_conv: 4}
    - {name: "l.4.m", kind: mamba2, group: 4, num_heads: 4, head_dim: 8, ssm_state_size: 16, n_groups: 2}
    - {name: "l.5.m", kind: gdn, group: 5, num_key_heads: 2, num_value_heads: 4, head_k_dim: 8, head_v_dim: 8}
cache: {block_size: 32, groups: {1: {block_size: 16}}}
""",
    )
    assert [layer.kind for layer in spec.layers] == [
        "attention", "sliding_window", "mla", "indexer", "mamba1", "mamba2", "gdn",
    ]  # fmt: skip
    assert spec.engine_id == "engine"
    assert spec.layers[1] == SlidingWindowSpec(
        name="l.1.a", group=1, num_kv_heads=2, head_dim=8, dtype="float16", window=64
    )
    assert spec.layers[5] == Mamba2Spec(
        name="l.4.m", group=4, num_heads=4, head_dim=8, state_size=16, num_groups=2, dtype="float16"
    )
    (rank,) = engine_layout(spec).ranks
    tokens = {item.group: item.block.tokens_per_block for item in rank.components}
    assert tokens == {0: 32, 1: 16, 2: 32, 3: None, 4: None, 5: None}


def test_a_latent_and_its_indexer_may_share_a_name(tmp_path):
    entry = '{name: "l.{0..1}.attn", kind: mla, latent_dim: 8}, {name: "l.{0..1}.attn", kind: indexer, head_dim: 4}'
    spec = read(tmp_path, f"model: {{layers: [{entry}]}}")
    (rank,) = engine_layout(spec).ranks
    assert [item.key for item in rank.components] == [
        ("l.0.attn", "latent"), ("l.0.attn", "indexer"), ("l.1.attn", "latent"), ("l.1.attn", "indexer"),
    ]  # fmt: skip
    with pytest.raises(DescriptionError, match=r"'l\.0\.attn' is named twice"):
        read(tmp_path, f"model: {{layers: [{entry.replace('indexer, head_dim: 4', 'mla, latent_dim: 8')}]}}")


def test_a_draft_layer_lives_on_the_last_stage(tmp_path):
    draft = '{name: "draft.0.attn", kind: attention, num_kv_heads: 8, head_dim: 64, draft: true}'
    text = EXAMPLE.replace("dtype: bfloat16}", f"dtype: bfloat16}}, {draft}").replace("pp: 1", "pp: 2")
    spec = read(tmp_path, text)
    assert spec.num_layers == 32
    assert [layer.name for layer in spec.stage_layers(1)][-1] == "draft.0.attn"
    assert all(item.optional == (item.layer == "draft.0.attn") for item in engine_layout(spec).ranks[-1].components)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_written_reads_back(tmp_path, seed):
    first = read(tmp_path, yaml.safe_dump(random_pairs.pair(seed)[seed % 2]))
    text = write_description(first)
    again = read(tmp_path, text)
    assert again == first
    assert engine_layout(again) == engine_layout(first)


def test_layers_are_written_as_ranges(tmp_path):
    text = write_description(read(tmp_path, EXAMPLE))
    assert "model.layers.{0..31}.self_attn" in text
    assert len(text.splitlines()) < 15
