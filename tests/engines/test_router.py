"""The router between real engines: streams, chat, and a client that leaves. What it sends is tested in tests/proxy."""

from __future__ import annotations

import json
import time
from itertools import islice

import httpx
import pytest

from kvplan.engines import external_tokens, make_prompt, prompt_text, read_metrics, total
from kvplan.engines.prompts import completion_body
from kvplan.proxy import build_app, serve_in_thread
from tests.engines.pool import NUM_TOKENS, Geometry, forget_prefixes

pytestmark = [pytest.mark.engines, pytest.mark.nixl, pytest.mark.timeout(400)]

LENGTH = 129


@pytest.fixture(scope="module")
def engines(pool):
    pool.answers("llama")
    return pool.get(Geometry(), Geometry(block_size=64))


@pytest.fixture
def url(engines):
    prefill, decode = engines
    forget_prefixes(decode)
    with serve_in_thread(build_app([prefill.url], [decode.url]), host="127.0.0.1", port=0) as url:
        yield url


def test_a_streamed_completion_is_that_of_a_single_engine(engines, pool, url):
    expected = pool.answers("llama")[LENGTH]
    before = external_tokens(read_metrics(engines[1].url))
    body = completion_body(list(expected.prompt), num_tokens=NUM_TOKENS, stream=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["token_ids"] for event in events[:-1]]
    assert tuple(token for piece in pieces for token in piece or ()) == expected.token_ids
    assert len(pieces) >= NUM_TOKENS
    assert external_tokens(read_metrics(engines[1].url)) - before == LENGTH


def test_a_chat_completion_is_that_of_a_single_engine(engines, pool, url):
    expected = pool.answers("llama")[LENGTH]
    before = external_tokens(read_metrics(engines[1].url))
    fields = completion_body([], num_tokens=NUM_TOKENS)
    del fields["prompt"]
    messages = [{"role": "user", "content": prompt_text(list(expected.prompt))}]
    answer = httpx.post(f"{url}/v1/chat/completions", json=fields | {"messages": messages}, timeout=60).json()
    assert answer["choices"][0]["message"]["content"].split() == prompt_text(list(expected.token_ids)).split()
    assert external_tokens(read_metrics(engines[1].url)) - before == LENGTH


def test_when_a_client_leaves_both_engines_are_free_again(engines, url):
    body = completion_body(make_prompt(300, seed=77), num_tokens=1500, stream=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        assert len(list(islice((line for line in response.iter_lines() if line), 3))) == 3
    assert until(lambda: all(is_free(engine.url) for engine in engines))


def is_free(url):
    metrics = read_metrics(url)
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return not any(total(metrics, name) for name in busy)


def until(true, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
    return true()
