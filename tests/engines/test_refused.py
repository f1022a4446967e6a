"""Two engines that must not exchange cache: the field is named with both values, the request ends well, both live."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from kvplan.engines import complete, external_tokens, prefill, prefill_and_decode, read_metrics
from kvplan.errors import EngineError
from tests.engines.pool import NUM_TOKENS, Geometry, counted, with_policy

pytestmark = [pytest.mark.engines, pytest.mark.nixl, pytest.mark.timeout(400)]

LENGTH = 100


class Case(NamedTuple):
    name: str
    prefill: Geometry
    line: str
    """What decode's log must say, as a pattern."""


CASES = [
    Case("other-dtype", Geometry(dtype="float32"), r"cache_dtype\W+ours\W+bfloat16\W+theirs\W+float32"),
    Case("other-model", Geometry("llama-more-layers"), r"model\.layers\W+ours\W+4\W+theirs\W+5"),
]
DECODE = {policy: Geometry(connector=with_policy(policy)) for policy in ("fail", "recompute")}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.mark.parametrize("policy", DECODE)
def test_a_mismatch_is_refused_by_name_and_both_engines_live(pool, case, policy):
    answers = pool.answers("llama")
    p, d = pool.get(case.prefill, DECODE[policy])
    expected = answers[LENGTH]
    prompt = list(expected.prompt)
    before = read_metrics(d.url)

    if policy == "recompute":
        answer = prefill_and_decode(p.url, d.url, prompt, num_tokens=NUM_TOKENS)
        assert answer.token_ids == expected.token_ids
    else:
        params = dict(prefill(p.url, prompt))
        with pytest.raises(EngineError, match="HTTP 500"):
            complete(d.url, prompt, num_tokens=NUM_TOKENS, kv_transfer_params=params)

    after = read_metrics(d.url)
    assert external_tokens(after) == external_tokens(before)
    assert counted(after, "received_bytes") == counted(before, "received_bytes")
    assert re.search(case.line, d.log_text()), d.log_text()[-3000:]
    assert complete(d.url, prompt, num_tokens=NUM_TOKENS).token_ids == expected.token_ids
    assert len(complete(p.url, prompt, num_tokens=NUM_TOKENS).token_ids) == NUM_TOKENS
