"""The commands as a person meets them: output, exit status, messages."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvplan.cli.app import app
from tests.cli import oracle

LAYERS = 'name: "model.layers.{0..3}.self_attn", kind: attention, num_kv_heads: 8, head_dim: 16, dtype: bfloat16'
SOURCE = f"engine_id: prefill-0\nmodel: {{layers: [{{{LAYERS}}}]}}\nparallel: {{tp: 2}}\ncache: {{num_blocks: 30}}\n"
DESTINATION = f"""\
engine_id: decode-0
model: {{layers: [{{{LAYERS}}}]}}
parallel: {{tp: 4}}
cache: {{block_size: 32, num_blocks: 20, kv_packing: packed, kv_layout: NHD}}
"""
REQUEST = {
    "num_tokens": 100,
    "groups": [
        {
            "source": {"first_token": 0, "block_ids": [7, 3, 9, 12, 4, 5, 6]},
            "destination": {"first_token": 32, "block_ids": [5, 6, 1]},
        }
    ],
}


@pytest.fixture
def files(tmp_path):
    for name, text in (("p.yaml", SOURCE), ("d.yaml", DESTINATION), ("r.json", json.dumps(REQUEST))):
        (tmp_path / name).write_text(text)
    return tmp_path


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_plan_prints_schema_1(files):
    result = run("plan", files / "p.yaml", files / "d.yaml", "--request", files / "r.json", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert list(found) == ["schema", "source", "destination", "copies", "readers"]
    assert found["schema"] == 1
    rank = found["destination"]["ranks"][3]
    assert list(rank) == ["tp", "pp", "dcp", "regions", "components"]
    assert list(rank["regions"][0]) == ["base", "block_stride_bytes", "num_blocks"]
    first = rank["components"][0]
    assert {key: x for key, x in first.items() if key != "axes"} == {
        "layer": "model.layers.0.self_attn", "component": "k", "group": 0, "region": 0, "base_bytes": 0,
        "atom_bytes": 32, "format": "bfloat16[16]", "tokens_per_block": 32,
    }  # fmt: skip
    assert first["axes"] == [
        {"name": "token", "spans": [{"start": 0, "stop": 32, "offset_bytes": 0, "stride_bytes": 64}]},
        {"name": "kv_head", "spans": [{"start": 6, "stop": 8, "offset_bytes": 0, "stride_bytes": 32}]},
    ]
    assert list(found["copies"][0]) == [
        "source_rank", "destination_rank", "source_address", "destination_address", "num_bytes",
    ]  # fmt: skip
    assert found["readers"] == {"0": [0, 1], "1": [2, 3]}
    assert oracle.check(found, REQUEST) == 68 * 4 * 2 * 8 * 32


def test_plan_in_words(files):
    result = run("plan", files / "p.yaml", files / "d.yaml", "--request", files / "r.json")
    assert result.exit_code == 0
    assert "rank 0 -> rank 1: 34816 bytes" in result.stdout


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_tokens": -1}, ["r.json", "num_tokens", "-1"]),
        ({"num_tokens": 10**15}, ["num_tokens", "at most"]),
        ({"num_tokens": "many"}, ["num_tokens", "'many'"]),
        ({"groups": []}, ["groups", "0 groups are given, the source has 1"]),
        ({"groups": None}, ["groups: null is not a list"]),
        ({"groups": [{"source": {}, "destination": {}}]}, ["groups.0.source: block_ids must be given"]),
        ({"groups": [{"source": {"block_ids": [], "first_token": 16 * 10**12}, "destination": {"block_ids": []}}]},
         ["groups.0.source.first_token", "at most"]),
        ({"group": []}, ["'group'", "groups"]),
        ({"groups": [{"source": {"block_ids": [1]}}]}, ["destination must be given"]),
        ({"groups": [{"source": {"block_ids": [30]}, "destination": {"block_ids": [0]}}]}, ["30", "[0, 30)"]),
        ({"groups": [{"source": {"block_ids": [1]}, "destination": {"block_ids": [2, 2]}}]}, ["block 2", "twice"]),
        ({"groups": [{"source": {"block_ids": [1]}, "destination": {"block_ids": [True]}}]}, ["true"]),
        ({"groups": [{"source": {"block_ids": [1]}, "destination": {"block_ids": [1], "first_token": 16}}]},
         ["first_token", "32 tokens"]),
    ],
)  # fmt: skip
def test_a_bad_request_ends_with_2(files, change, words):
    (files / "r.json").write_text(json.dumps(REQUEST | change))
    result = run("plan", files / "p.yaml", files / "d.yaml", "--request", files / "r.json", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    for word in words:
        assert word in result.stderr


def test_what_the_source_lacks_is_not_moved_and_said(files):
    request = {
        "num_tokens": 100,
        "groups": [{**REQUEST["groups"][0], "source": {"first_token": 0, "block_ids": [7, 3, 9]}}],
    }
    (files / "r.json").write_text(json.dumps(request))
    result = run("plan", files / "p.yaml", files / "d.yaml", "--request", files / "r.json", "--json")
    assert result.exit_code == 0
    assert "needs tokens from 48" in result.stderr
    assert oracle.check(json.loads(result.stdout), request) == 16 * 4 * 2 * 8 * 32


def test_holes_move_nothing(files):
    request = {
        "num_tokens": 64,
        "groups": [
            {
                "source": {"first_token": 0, "block_ids": [-1, -1, 3, 9]},
                "destination": {"first_token": 0, "block_ids": [-1, 4]},
            }
        ],
    }
    (files / "r.json").write_text(json.dumps(request))
    result = run("plan", files / "p.yaml", files / "d.yaml", "--request", files / "r.json", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert oracle.check(json.loads(result.stdout), request) == 32 * 4 * 2 * 8 * 32


@pytest.mark.parametrize("command", ["check", "explain", "plan"])
def test_engines_that_cannot_end_with_1(files, command):
    text = DESTINATION.replace("num_kv_heads: 8", "num_kv_heads: 4").replace("bfloat16", "float16")
    (files / "d.yaml").write_text(text)
    request = ["--request", files / "r.json"] if command == "plan" else []
    result = run(command, files / "p.yaml", files / "d.yaml", *request)
    assert result.exit_code == 1
    text = result.stdout + result.stderr
    assert "dtype (k, v of 4 layers, first model.layers.0.self_attn)" in text
    assert "bfloat16" in text
    assert "float16" in text


def test_check_names_every_field_and_what_would_work(files):
    text = DESTINATION.replace("num_kv_heads: 8", "num_kv_heads: 4").replace("{0..3}", "{0..4}")
    (files / "d.yaml").write_text(text)
    result = run("check", files / "p.yaml", files / "d.yaml")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    for field, values in (
        ("layer model.layers.4.self_attn", "source missing, destination present"),
        ("num_kv_heads (k, v of 4 layers, first model.layers.0.self_attn)", "source 8, destination 4"),
    ):
        at = lines.index(f"  {field}: {values}")
        assert "what would work" in lines[at + 1]


def test_windows_must_match_but_one_side_may_keep_all(files):
    window = LAYERS.replace("kind: attention", "kind: sliding_window, window: 64")
    (files / "p.yaml").write_text(SOURCE.replace(LAYERS, window))
    assert run("check", files / "p.yaml", files / "d.yaml").exit_code == 0
    (files / "d.yaml").write_text(DESTINATION.replace(LAYERS, window.replace("64", "128")))
    result = run("check", files / "p.yaml", files / "d.yaml")
    assert result.exit_code == 1
    assert "window (4 layers, first model.layers.0.self_attn): source 64, destination 128" in result.stdout


def test_check_says_yes(files):
    result = run("check", files / "p.yaml", files / "d.yaml")
    assert result.exit_code == 0
    assert "yes: " in result.stdout


@pytest.mark.parametrize("command", ["check", "explain", "plan"])
def test_bad_input_ends_with_2(files, command):
    (files / "d.yaml").write_text(DESTINATION.replace("tp: 4", "tp: zero"))
    request = ["--request", files / "r.json"] if command == "plan" else []
    result = run(command, files / "p.yaml", files / "d.yaml", *request)
    assert result.exit_code == 2
    assert "d.yaml:3: parallel.tp: 'zero'" in result.stderr
    assert run(command, files / "none.yaml", files / "d.yaml", *request).exit_code == 2
    assert run(command, files / "p.yaml").exit_code == 2


def test_explain_says_who_sends_what_and_why(files):
    result = run("explain", files / "p.yaml", files / "d.yaml", "--bandwidth", "12.5", "--descriptor-cost", "2")
    assert result.exit_code == 0
    text = result.stdout
    for words in (
        "P0 tp0",
        "D3 tp3",
        "KV heads 6-7",
        "readers per source rank: P0: 2, P1: 2",
        "staged",
        "at 12.5 GB/s",
    ):
        assert words in text


@pytest.mark.parametrize(
    "source, destination, hint",
    [
        ("kv_layout: HND", "kv_layout: NHD", "kv_layout is HND and NHD"),
        ("kv_layout: NHD", "kv_layout: NHD", "unequal TP cuts every token's row"),
        ("kv_layout: HND, block_size: 256", "kv_layout: HND, block_size: 256", None),
    ],
)
def test_explain_says_what_would_lengthen_runs(files, source, destination, hint):
    (files / "p.yaml").write_text(SOURCE.replace("num_blocks", f"{source}, num_blocks"))
    (files / "d.yaml").write_text(SOURCE.replace("num_blocks", f"{destination}, num_blocks").replace("tp: 2", "tp: 4"))
    result = run("explain", files / "p.yaml", files / "d.yaml")
    assert result.exit_code == 0
    assert (hint in result.stdout) if hint else ("hint" not in result.stdout)


def test_explain_stages_in_host_memory_only(files):
    for name in ("p.yaml", "d.yaml"):
        (files / name).write_text((files / name).read_text().replace("num_blocks", "device: cuda, num_blocks"))
    text = run("explain", files / "p.yaml", files / "d.yaml").stdout
    assert "staging is for host memory" in text
    assert "reads" not in text.split("What moves")[0]


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_the_picture_is_whole(files, suffix):
    out = files / f"picture.{suffix}"
    result = run("explain", files / "p.yaml", files / "d.yaml", "--picture", out)
    assert result.exit_code == 0
    text = out.read_text()
    start, stop = text.index("<svg"), text.index("</svg>") + 6
    root = ET.fromstring(text[start:stop])
    names = {node.tag.split("}")[1] for node in root.iter()}
    assert {"path", "rect", "text", "circle"} <= names
    ribbons = [node for node in root.iter("{http://www.w3.org/2000/svg}path") if list(node)]
    assert len(ribbons) == 4
    for word in ("P0 tp0", "P1 tp1", "D0 tp0", "D3 tp3", "prefill-0"):
        assert word in text


def test_names_in_a_picture_are_escaped(files):
    (files / "p.yaml").write_text(SOURCE.replace("prefill-0", '"<b>&"'))
    out = files / "picture.html"
    assert run("explain", files / "p.yaml", files / "d.yaml", "--picture", out).exit_code == 0
    assert "<b>" not in out.read_text()
    assert "&lt;b&gt;&amp;" in out.read_text()


@pytest.mark.parametrize("name", ["picture.png", "no/such/folder.svg"])
def test_a_picture_that_cannot_be_written_ends_with_2(files, name):
    result = run("explain", files / "p.yaml", files / "d.yaml", "--picture", files / name)
    assert result.exit_code == 2
    assert name in result.stderr


def test_version():
    assert run("--version").stdout.startswith("kvplan ")


PAGE = (Path(__file__).parents[2] / "docs" / "plan-json.md").read_text()


def documented(keyword):
    blocks = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return json.loads(next(block for block in blocks if keyword in block))


def test_the_documented_schema_names_what_is_printed(files):
    result = run("plan", files / "p.yaml", files / "d.yaml", "--request", files / "r.json", "--json")
    schema = documented("$schema")
    follow(schema, schema, json.loads(result.stdout))


def follow(schema, whole, value):
    """Check the few words of JSON schema that the page uses, and that no field is undocumented."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if "const" in schema:
        assert value == schema["const"]
        return
    types = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    assert isinstance(value, tuple(types[name] for name in names))
    assert value is None or not isinstance(value, int) or value >= schema.get("minimum", value)
    if isinstance(value, dict):
        assert set(schema.get("required", [])) <= value.keys()
        for key, own in value.items():
            follow(schema.get("properties", {}).get(key) or schema["additionalProperties"], whole, own)
    if isinstance(value, list):
        assert len(value) >= schema.get("minItems", 0)
        for own in value:
            follow(schema["items"], whole, own)


def test_the_documented_request_is_read(files):
    request = documented("num_tokens")
    (files / "p.yaml").write_text(SOURCE.replace("num_blocks: 30", "num_blocks: 30, block_size: 32"))
    (files / "r.json").write_text(json.dumps(request))
    result = run("plan", files / "p.yaml", files / "d.yaml", "--request", files / "r.json", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert oracle.check(json.loads(result.stdout), request) == 68 * 4 * 2 * 8 * 32
