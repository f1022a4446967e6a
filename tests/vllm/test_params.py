"""What crosses the router, whole and broken."""

import json

import pytest

from kvplan.vllm.params import ParamsError, decode, prompt_digest, wants_remote_decode, wants_remote_prefill
from tests.vllm.requests import WINDOW_GROUPS, handoff


def whole():
    """Return what a window model's prefill engine answers for 200 tokens: it stops at 199."""
    return handoff(200, ([1, 2, 3, 4], [0, 0, 7, 8]), WINDOW_GROUPS)


def test_parameters_survive_json():
    read = decode(json.loads(json.dumps(whole())))
    assert (read.remote.engine_id, read.remote.host, read.remote.port) == ("p", "10.0.0.1", 5600)
    assert [(table.first_token, table.block_ids) for table in read.remote.tables] == [(0, (1, 2, 3, 4)), (128, (7, 8))]
    assert (read.remote.num_tokens, read.remote.generation, read.first_kept_token) == (199, "nonce0", 128)


def test_unknown_keys_are_ignored_and_a_port_may_be_text():
    assert decode(whole() | {"remote_port": "5601", "priority": [1]}).remote.port == 5601


def without(key):
    params = whole()
    del params[key]
    return params


def own(**change):
    params = whole()
    params["kvplan"] = params["kvplan"] | change
    return params


BROKEN = {
    "no kvplan": (without("kvplan"), "kvplan is missing"),
    "schema": (own(schema=2), "schema is 2"),
    "engine id": (whole() | {"remote_engine_id": None}, "remote_engine_id is None"),
    "wildcard host": (whole() | {"remote_host": "0.0.0.0"}, "no peer can reach"),
    "long host": (whole() | {"remote_host": "x" * 600}, "remote_host"),
    "port": (whole() | {"remote_port": 70000}, "remote_port is 70000"),
    "port is true": (whole() | {"remote_port": True}, "remote_port is True"),
    "blocks": (whole() | {"remote_block_ids": "1,2"}, "not a list"),
    "a block id": (whole() | {"remote_block_ids": [[1, "2"], [7]]}, "something else than block ids"),
    "a negative block id": (whole() | {"remote_block_ids": [[1, -2], [7]]}, "something else than block ids"),
    "groups": (whole() | {"remote_block_ids": [[1]]}, "one token per group"),
    "no groups": (whole() | {"remote_block_ids": []}, "one per group"),
    "first token": (own(first_tokens=[0, "a"]), "first_tokens holds 'a'"),
    "tokens": (whole() | {"remote_num_tokens": 0}, "remote_num_tokens is 0"),
    "generation": (own(generation=7), "generation is 7"),
    "lease": (own(lease_s="soon"), "lease_s is 'soon'"),
    "request id": (whole() | {"remote_request_id": {"a": 1}}, "remote_request_id"),
}


@pytest.mark.parametrize("params,why", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_broken_is_named(params, why):
    with pytest.raises(ParamsError, match=why):
        decode(params)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": None}])
def test_no_wish_is_no_wish(params):
    assert not wants_remote_decode(params)
    assert not wants_remote_prefill(params)


def test_the_digest_tells_prompts_and_adapters_apart():
    assert prompt_digest([1, 2, 3], 3) != prompt_digest([1, 2, 4], 3)
    assert prompt_digest([1, 2, 3], 3) != prompt_digest([1, 2, 3], 3, "lora")
    assert prompt_digest([1, 2], 3) == prompt_digest(None, 3) == ""
