"""The JSON form speaks one language: a layer's component has one format, whatever each side declares."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvplan.cli.app import app
from tests.cli import oracle

ENGINE = """\
engine_id: {name}
model: {{layers: [{{name: "model.layers.{{0..1}}.self_attn", kind: attention, num_kv_heads: 4, head_dim: 8}}]}}
parallel: {{tp: {tp}}}
cache: {{block_size: {block}, kernel_block_size: 8, num_blocks: 20, kv_layout: {layout}, kv_packing: {packing}}}
"""
REQUEST = {
    "num_tokens": 60,
    "groups": [
        {
            "source": {"first_token": 0, "block_ids": [7, 3, 9, 12]},
            "destination": {"first_token": 24, "block_ids": [5, 6]},
        }
    ],
}


@pytest.fixture
def plan(tmp_path):
    def planned(source, destination, request=REQUEST):
        for name, tp, block, layout in (("p", 2, 16, source), ("d", 1, 24, destination)):
            packing = "interleaved" if name == "p" else "split"
            text = ENGINE.format(name=name, tp=tp, block=block, layout=layout, packing=packing)
            (tmp_path / f"{name}.yaml").write_text(text)
        (tmp_path / "r.json").write_text(json.dumps(request))
        arguments = ["plan", tmp_path / "p.yaml", tmp_path / "d.yaml", "--request", tmp_path / "r.json", "--json"]
        return CliRunner().invoke(app, list(map(str, arguments)))

    return planned


@pytest.mark.parametrize("source", ["HND", "NHD", "TRANSPOSED"])
@pytest.mark.parametrize("destination", ["HND", "NHD", "TRANSPOSED"])
def test_a_component_has_one_format_and_the_same_axes_on_both_sides(plan, source, destination):
    found = json.loads(plan(source, destination).stdout)
    forms = {}
    for side in ("source", "destination"):
        for rank in found[side]["ranks"]:
            for item in rank["components"]:
                axes = tuple(axis["name"] for axis in item["axes"])
                form = (item["format"], item["atom_bytes"], axes)
                assert forms.setdefault((item["layer"], item["component"]), form) == form
    transposed = "TRANSPOSED" in (source, destination)
    assert forms["model.layers.0.self_attn", "k"][0] == ("bfloat16" if transposed else "bfloat16[8]")
    assert forms["model.layers.0.self_attn", "v"][0] == "bfloat16[8]"
    assert oracle.check(found, REQUEST) == 36 * 2 * 2 * 4 * 16


def test_blocks_that_end_early_are_said_aloud(plan):
    result = plan("HND", "HND", REQUEST | {"num_tokens": 100})
    assert result.exit_code == 0
    assert "groups.0.destination: its blocks end at token 72, num_tokens is 100" in result.stderr
    assert not plan("HND", "HND").stderr


def test_state_lists_of_unequal_length_name_the_file(tmp_path):
    state = '{name: "l.{0..1}.mixer", kind: mamba2, num_heads: 4, head_dim: 4, state_size: 4}'
    for name in ("p", "d"):
        (tmp_path / f"{name}.yaml").write_text(f"model: {{layers: [{state}]}}\n")
    entry = {"source": {"block_ids": [3, 4]}, "destination": {"block_ids": [8]}}
    (tmp_path / "r.json").write_text(json.dumps({"num_tokens": 5, "groups": [entry]}))
    arguments = ["plan", tmp_path / "p.yaml", tmp_path / "d.yaml", "--request", tmp_path / "r.json"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "r.json: groups: state blocks are paired in order, but the source names 2" in result.stderr
