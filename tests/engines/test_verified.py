"""Real engines whose reads are all verified: nothing is blamed, and the tokens are those of a single engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.engines import KVPLAN, prefill_and_decode, read_metrics
from tests.engines.pool import LENGTHS, NUM_TOKENS, Geometry, counted, forget_prefixes

pytestmark = [pytest.mark.engines, pytest.mark.nixl, pytest.mark.timeout(400)]

VERIFIED = replace(KVPLAN, extra=(("verify_rate", 1.0),))


def test_what_engines_move_is_what_they_have(pool):
    answers = pool.answers("llama")
    prefill, decode = pool.get(
        Geometry(tp=1, block_size=32, connector=VERIFIED, copy=2),
        Geometry(tp=2, block_size=64, connector=VERIFIED, copy=2),
    )
    forget_prefixes(decode)
    for length in LENGTHS:
        expected = answers[length]
        answer = prefill_and_decode(prefill.url, decode.url, list(expected.prompt), num_tokens=NUM_TOKENS)
        assert answer.token_ids == expected.token_ids, length
    after = read_metrics(decode.url)
    assert counted(after, "digest_mismatches") == counted(after, "reads_failed") == 0
    assert counted(after, "reads_verified") == counted(after, "reads_received") >= 2 * (len(LENGTHS) - 1)
    assert counted(read_metrics(prefill.url), "digests_answered") >= counted(after, "reads_verified")
