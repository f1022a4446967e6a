"""Prefill on one engine, decode on another with another geometry: the tokens of a single engine, from moved cache.

Every test moves one prompt. Prompt lengths lie at, before and behind block boundaries of 32, 64 and 96 tokens. A single
prompt token is always computed by the engine itself: nothing of its cache would be used.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kvplan.engines import external_tokens, prefill_and_decode, read_metrics
from tests.engines.pool import LENGTHS, NUM_TOKENS, Geometry, counted, forget_prefixes

pytestmark = [pytest.mark.engines, pytest.mark.nixl, pytest.mark.timeout(400)]


class Pair(NamedTuple):
    name: str
    prefill: Geometry
    decode: Geometry


def pair(name, model, *, tp, block_size):
    (p_tp, d_tp), (p_block, d_block) = tp, block_size
    prefill = Geometry(model, p_tp, p_block)
    decode = Geometry(model, d_tp, d_block)
    if prefill == decode:
        decode = Geometry(model, d_tp, d_block, copy=1)
    return Pair(name, prefill, decode)


# In an order that lets neighbours share engines: each engine may be the prefill side of one pair and the decode side
# of the next.
PAIRS = [
    pair("equal", "llama", tp=(1, 1), block_size=(32, 32)),
    pair("tp-1-to-2", "llama", tp=(1, 2), block_size=(32, 32)),
    pair("tp-2-to-1", "llama", tp=(2, 1), block_size=(32, 32)),
    pair("tp-2-to-2", "llama", tp=(2, 2), block_size=(32, 32)),
    pair("blocks-32-to-64", "llama", tp=(1, 1), block_size=(32, 64)),
    pair("blocks-64-to-32", "llama", tp=(1, 1), block_size=(64, 32)),
    pair("blocks-96-to-64", "llama", tp=(1, 1), block_size=(96, 64)),
    pair("tp-1-to-2-blocks-32-to-64", "llama", tp=(1, 2), block_size=(32, 64)),
    pair("tp-2-to-1-blocks-64-to-32", "llama", tp=(2, 1), block_size=(64, 32)),
    pair("one-kv-head-tp-2-to-1", "llama-one-kv-head", tp=(2, 1), block_size=(32, 32)),
    pair("one-kv-head-tp-1-to-2", "llama-one-kv-head", tp=(1, 2), block_size=(32, 32)),
]


@pytest.fixture(scope="module", params=PAIRS, ids=lambda one: one.name)
def engines(request, pool):
    """Prefill engine, decode engine, and the reference answers, with nothing cached at decode."""
    answers = pool.answers(request.param.prefill.model)
    prefill, decode = pool.get(request.param.prefill, request.param.decode)
    forget_prefixes(decode)
    return prefill, decode, answers


@pytest.mark.parametrize("length", LENGTHS, ids=lambda length: f"{length}-tokens")
def test_decode_continues_as_a_single_engine_would(engines, length):
    prefill, decode, answers = engines
    expected = answers[length]
    before = read_metrics(decode.url)

    answer = prefill_and_decode(prefill.url, decode.url, list(expected.prompt), num_tokens=NUM_TOKENS)

    after = read_metrics(decode.url)
    assert answer.token_ids == expected.token_ids
    assert external_tokens(after) - external_tokens(before) == (length if length > 1 else 0)
    assert counted(after, "reads_failed") == 0
    if length > 1:
        assert counted(after, "received_bytes") > counted(before, "received_bytes")


def test_wrong_cache_would_be_seen(engines):
    """The control: with another prompt's cache the same decode engine gives other tokens, so equal tokens mean much."""
    prefill, decode, answers = engines
    mine, other = answers[300], answers[500]
    wrong = [*other.prompt[:299], mine.prompt[-1]]
    answer = prefill_and_decode(prefill.url, decode.url, wrong, num_tokens=NUM_TOKENS)
    assert answer.token_ids != mine.token_ids
