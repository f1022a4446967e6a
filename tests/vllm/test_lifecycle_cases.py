"""Cases of the lifecycle collection that end in the scheduler's half: which blocks are named, and how often."""

import pytest

from kvplan.errors import BindError
from kvplan.planner import BlockTable, bind, plan_rank
from kvplan.testing.strategies import Shape, engine
from kvplan.vllm.groups import Group
from tests.vllm.requests import TO_PREFILL, finished, handoff, request, side

SIXTEEN = (Group(0, 16),)


def moved_pairs(source_ids, first_token, destination_ids, *, num_tokens):
    """Return (source block, destination block) of everything that is moved between equal blocks of 4 tokens."""
    shape = Shape(parallel=1, block_size=4, kernel_block_size=4, order="HND", packing="split")
    here = engine("p", shape, 1, num_layers=1, num_blocks=64, base=1 << 20)
    there = engine("d", shape, 1, num_layers=1, num_blocks=64, base=1 << 30)
    (plan,) = plan_rank(here, there, 0)
    table = BlockTable(first_token, destination_ids)
    runs = bind(plan, [BlockTable(0, source_ids)], [table], num_tokens=num_tokens, whole_blocks=True)
    (one, *_), (other, *_) = here.ranks[0].regions, there.ranks[0].regions
    found = set()
    for source, destination, size in zip(
        runs.source_address.tolist(), runs.destination_address.tolist(), runs.num_bytes.tolist(), strict=True
    ):
        first, second = source - one.base, destination - other.base
        if first < one.block_stride_bytes * one.num_blocks:
            found |= {((first + at) // one.block_stride_bytes, (second + at) // other.block_stride_bytes)
                      for at in range(0, size, one.block_stride_bytes)}  # fmt: skip
    return found


def test_t25_of_ten_blocks_the_last_four_go_to_a_reader_of_four():
    source = tuple(range(10, 20))
    assert moved_pairs(source, 24, (1, 2, 3, 4), num_tokens=40) == {(16, 1), (17, 2), (18, 3), (19, 4)}


def test_t25_a_reader_of_more_than_there_is_is_refused():
    with pytest.raises(BindError):
        moved_pairs(tuple(range(10, 20)), 0, tuple(range(1, 13)), num_tokens=48)


def test_t27_blocks_of_all_chunks_are_offered_and_those_before_a_preemption_are_not():
    """100 tokens in chunks of 32, blocks of 16: 2, 2, 2 and 1 new ids; the offer is made once, of what is held then."""
    prefill = side(SIXTEEN)
    item = request("p-1", 100, TO_PREFILL)
    prefill.on_new_request(item)
    for _ in range(4):
        assert not prefill.build_metadata().offers
    _, params = finished(prefill, item, ([21, 22, 23, 24, 5, 6, 7],))  # the first four are others than before
    assert params["remote_block_ids"] == [[21, 22, 23, 24, 5, 6, 7]]
    (offer,) = prefill.build_metadata().offers
    assert offer.tables[0].block_ids == (21, 22, 23, 24, 5, 6, 7)
    assert not prefill.build_metadata().offers


def test_t28_a_loaded_prompt_is_not_loaded_again_however_often_the_engine_asks():
    """The pool is full in the step after the load; vLLM asks again and forwards the one token that it must."""
    decode = side(engine_id="d")
    item = request("d-1", 96, handoff(96, ([1, 2, 3],)))
    decode.on_new_request(item)
    assert decode.matched_tokens(item, 0) == (96, True)
    decode.allocated(item, ([4, 5, 6],), 96)
    assert len(decode.build_metadata().reads) == 1
    decode.received(["d-1"])
    for _ in range(3):
        assert decode.matched_tokens(item, 95) == (0, False)
        decode.allocated(item, ([4, 5, 6],), 0)
        step = decode.build_metadata()
        assert (step.reads, step.releases, step.cancels) == ([], [], [])


@pytest.mark.parametrize("recompute", [False, True])
def test_t46_an_incomplete_handoff_is_named_in_the_log(recompute, caplog):
    decode = side(engine_id="d", recompute=recompute)
    params = handoff(96, ([1, 2, 3],))
    del params["remote_block_ids"]
    item = request("d-1", 96, params)
    decode.on_new_request(item)
    assert "d-1" in caplog.text
    assert "remote_block_ids" in caplog.text
    expected = (0, False) if recompute else (96, True)
    assert decode.matched_tokens(item, 0) == expected
