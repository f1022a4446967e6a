"""The JSON form against a brute-force oracle that reads nothing but the JSON."""

from __future__ import annotations

import json

import pytest
import yaml

from kvplan.cli.engine_file import load_pair
from kvplan.cli.pairs import bound_pairs, proved_plan
from kvplan.cli.plan_json import plan_json
from kvplan.cli.request_file import read_request
from tests.cli import oracle, random_pairs


def planned(tmp_path, source, destination, request):
    files = [tmp_path / name for name in ("p.yaml", "d.yaml", "r.json")]
    for file, data in zip(files, (source, destination), strict=False):
        file.write_text(yaml.safe_dump(data))
    files[2].write_text(json.dumps(request))
    ours, theirs = load_pair(*map(str, files[:2]))
    plan = proved_plan(ours, theirs)
    wanted = read_request(str(files[2]), ours, theirs)
    return plan, json.loads(
        json.dumps(plan_json(ours.layout, theirs.layout, bound_pairs(plan, wanted, require_cover=True)))
    )


def run(tmp_path, seeds):
    moved = 0
    for seed in seeds:
        source, destination, request = random_pairs.pair(seed)
        _, found = planned(tmp_path, source, destination, request)
        try:
            moved += oracle.check(found, request)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return moved


@pytest.mark.parametrize("part", range(10))
def test_random_deployments_of_all_kinds(tmp_path, part):
    assert run(tmp_path, range(part * 100, part * 100 + 100)) > 0


def shift_source(plan):
    copy = next(c for c in plan["copies"] if c["num_bytes"] > 1)
    copy["source_address"] += 1
    copy["num_bytes"] -= 1


def drop_copy(plan):
    plan["copies"].pop()


def write_twice(plan):
    plan["copies"].append(dict(plan["copies"][0]))


def forget_reader(plan):
    plan["readers"][str(plan["copies"][0]["source_rank"])] = []


def swap_ranks(plan):
    plan["copies"][0]["source_rank"] = (plan["copies"][0]["source_rank"] + 1) % len(plan["source"]["ranks"])


def next_head(plan):
    axes = [axis for rank in plan["source"]["ranks"] for item in rank["components"] for axis in item["axes"]]
    for span in (span for axis in axes if axis["name"] == "kv_head" for span in axis["spans"]):
        span["start"], span["stop"] = span["start"] + 1, span["stop"] + 1


@pytest.mark.parametrize("fault", [shift_source, drop_copy, write_twice, forget_reader, swap_ranks, next_head])
def test_the_oracle_notices_a_wrong_plan(tmp_path, fault):
    seed = next(s for s in range(100) if wanted_seed(random_pairs.pair(s)))
    _, found = planned(tmp_path, *random_pairs.pair(seed))
    request = random_pairs.pair(seed)[2]
    assert oracle.check(found, request) > 0
    fault(found)
    with pytest.raises(AssertionError):
        oracle.check(found, request)


def wanted_seed(pair):
    source, _, request = pair
    first = source["model"]["layers"][0]
    cached = request["groups"][first["group"]]["destination"]["first_token"]
    return first["kind"] == "attention" and source["parallel"]["tp"] > 1 and request["num_tokens"] > 20 and not cached


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(10))
def test_many_random_deployments_of_all_kinds(tmp_path, part):
    assert run(tmp_path, range(10_000 + part * 1000, 10_000 + part * 1000 + 1000)) > 0
