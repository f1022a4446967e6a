"""Real deployments: all three commands, and samples of every component followed by hand through the JSON."""

from __future__ import annotations

import bisect
import itertools
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvplan.cli.app import app

FOLDER = Path(__file__).parents[2] / "examples" / "deployments"
DEPLOYMENTS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def run(command, name, *words):
    files = [str(FOLDER / name / file) for file in ("prefill.yaml", "decode.yaml")]
    return CliRunner().invoke(app, [command, *files, *map(str, words)])


def test_there_are_ten_at_least():
    assert len(DEPLOYMENTS) >= 10


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_check_and_explain(name, tmp_path):
    assert run("check", name).exit_code == 0
    result = run("explain", name, "--picture", tmp_path / "out.svg")
    assert result.exit_code == 0
    assert "readers per source rank" in result.stdout
    assert (tmp_path / "out.svg").stat().st_size > 4000


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_samples_of_the_plan(name):
    request = json.loads((FOLDER / name / "request.json").read_text())
    result = run("plan", name, "--request", FOLDER / name / "request.json", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    plan = json.loads(result.stdout)
    copies = sorted(plan["copies"], key=lambda copy: copy["destination_address"])
    for left, right in itertools.pairwise(copies):
        assert left["destination_address"] + left["num_bytes"] <= right["destination_address"]
    starts = [copy["destination_address"] for copy in copies]
    holders = {}
    for number, rank in enumerate(plan["source"]["ranks"]):
        for item in rank["components"]:
            holders.setdefault((item["layer"], item["component"]), []).append((number, rank, item))
    rng = random.Random(name)
    for number, rank in enumerate(plan["destination"]["ranks"]):
        for item in rng.sample(rank["components"], min(12, len(rank["components"]))):
            for _ in range(8):
                token, place, group = sample(rng, item, request)
                if token is not None and token >= request["num_tokens"]:
                    continue
                address = locate(rank, item, group["destination"], token, place)
                copy = copies[bisect.bisect_right(starts, address) - 1]
                assert copy["destination_rank"] == number
                assert address + item["atom_bytes"] <= copy["destination_address"] + copy["num_bytes"]
                wanted = address - copy["destination_address"] + copy["source_address"]
                held = [(n, r, c) for n, r, c in holders[item["layer"], item["component"]] if n == copy["source_rank"]]
                ((_, source, own),) = held
                assert locate(source, own, request["groups"][own["group"]]["source"], token, place) == wanted


def sample(rng, item, request):
    """Return (global token, other coordinates, group) of an atom that the request needs."""
    group = request["groups"][item["group"]]
    place = {axis["name"]: pick(rng, axis) for axis in item["axes"]}
    token = place.pop("token", None)
    if token is not None:
        table, first = group["destination"], max(group[side]["first_token"] for side in group)
        while True:
            block = rng.randrange(len(table["block_ids"]))
            found = table["first_token"] + block * item["tokens_per_block"] + token
            if found >= first:
                return found, place, group
            token = pick(rng, next(axis for axis in item["axes"] if axis["name"] == "token"))
    return None, place, group


def pick(rng, axis):
    span = rng.choice(axis["spans"])
    return rng.randrange(span["start"], span["stop"])


def locate(rank, item, table, token, place):
    region = rank["regions"][item["region"]]
    entry, within = (0, None)
    if token is not None:
        entry, within = divmod(token - table["first_token"], item["tokens_per_block"])
    total = region["base"] + table["block_ids"][entry] * region["block_stride_bytes"] + item["base_bytes"]
    for axis in item["axes"]:
        x = within if axis["name"] == "token" else place[axis["name"]]
        span = next(span for span in axis["spans"] if span["start"] <= x < span["stop"])
        total += span["offset_bytes"] + (x - span["start"]) * span["stride_bytes"]
    return total
