"""Whole requests through running sessions over the memory transport, compared coordinate by coordinate."""

import pytest

from kvplan.testing.strategies import Shape
from tests.session.engines import D_SHAPE, P_SHAPE, Engine, pair, wait_until

TOKENS = 24
"""A whole number of blocks on both sides (4 and 6)."""

SHAPES = {
    "2-to-3": (P_SHAPE, D_SHAPE),
    "3-to-2": (D_SHAPE, P_SHAPE),
    "1-to-1": (Shape(1, 4, 4, "HND", "split"), Shape(1, 4, 4, "HND", "split")),
    "4-to-1": (Shape(4, 4, 2, "TRANSPOSED", "packed"), Shape(1, 6, 3, "HND", "interleaved")),
    "1-to-4": (Shape(1, 6, 3, "NHD", "split"), Shape(4, 4, 4, "TRANSPOSED", "split")),
    "replicated-8-to-2": (Shape(8, 4, 4, "HND", "split"), Shape(2, 6, 6, "HND", "split")),
    "replicated-2-to-8": (Shape(2, 4, 4, "HND", "split"), Shape(8, 6, 6, "HND", "split")),
}


def run_one(prefill: Engine, decode: Engine, name: str = "r1"):
    source, destination = prefill.table(TOKENS), decode.table(TOKENS, first_block=3)
    prefill.fill(source)
    remote = prefill.offer(name, source, TOKENS)
    decode.read(f"local-{name}", remote, destination)
    wait_until(lambda: decode.received(f"local-{name}"), what="received")
    wait_until(lambda: prefill.sent(name), what="sent")
    decode.check(destination, TOKENS)


@pytest.mark.parametrize("name", SHAPES)
def test_a_request_moves_right_and_is_freed(name):
    with pair(*SHAPES[name]) as (prefill, decode):
        run_one(prefill, decode)
        assert prefill.total("expiries") == 0
        assert decode.total("reads_failed") == 0
        assert prefill.total("loop_errors") + decode.total("loop_errors") == 0
