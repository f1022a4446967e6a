"""What the scheduler's half makes of requests: offers, reads, releases, by token position."""

import pytest
from vllm.v1.request import RequestStatus

from tests.vllm.requests import (
    STATE_GROUPS,
    TO_PREFILL,
    WINDOW_GROUPS,
    Clock,
    finished,
    handoff,
    request,
    side,
)


def tables(reads_or_tables):
    return [(table.first_token, tuple(table.block_ids)) for table in reads_or_tables]


def test_a_finished_prefill_is_offered_with_its_token_positions():
    prefill = side(lease_s=12.0)
    item = request("p-1", 100, TO_PREFILL | {"router_tag": 7})
    prefill.on_new_request(item)
    keep, params = finished(prefill, item, ([3, 4, 5, 6],))
    (offer,) = prefill.build_metadata().offers
    assert keep
    assert (offer.request_id, offer.generation, offer.num_tokens, offer.lease_s) == ("p-1", "nonce0", 100, 12.0)
    assert tables(offer.tables) == [(0, (3, 4, 5, 6))]
    assert params["remote_block_ids"] == [[3, 4, 5, 6]]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("p", "p-1")
    assert (params["remote_host"], params["remote_port"], params["tp_size"]) == ("10.0.0.1", 5600, 1)
    assert params["router_tag"] == 7


def test_lookahead_blocks_do_not_leave():
    # Prompt 128 of 64-token blocks plus one lookahead token: three blocks are held, two leave (T24).
    prefill = side(WINDOW_GROUPS[:1])
    item = request("p-1", 128, TO_PREFILL)
    _, params = finished(prefill, item, ([7, 8, 9],))
    assert params["remote_block_ids"] == [[7, 8]]
    # Prompt 130: three real blocks, all leave.
    _, params = finished(prefill, request("p-2", 130, TO_PREFILL), ([7, 8, 9],))
    assert params["remote_block_ids"] == [[7, 8, 9]]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED])
def test_an_aborted_prefill_is_not_offered(status):
    prefill = side()
    item = request("p-1", 40, TO_PREFILL)
    assert finished(prefill, item, ([1, 2],), status=status) == (False, None)
    assert not prefill.build_metadata()


def test_a_consumer_does_not_offer():
    assert finished(side(is_producer=False), request("p-1", 40, TO_PREFILL), ([1, 2],)) == (False, None)


def test_a_request_that_names_no_other_engine_is_left_alone():
    local = side()
    item = request("l-1", 40)
    local.on_new_request(item)
    assert local.matched_tokens(item, 0) == (0, False)
    local.allocated(item, ([1, 2],), 0)
    assert finished(local, item, ([1, 2],)) == (False, None)
    assert not local.build_metadata()


def test_all_tokens_are_read_when_nothing_is_here():
    decode = side(engine_id="d")
    item = request("d-1", 100, handoff(100, ([3, 4, 5, 6],)))
    decode.on_new_request(item)
    assert decode.matched_tokens(item, 0) == (100, True)
    decode.allocated(item, ([9, 8, 7, 6],), 100)
    (read,) = decode.build_metadata().reads
    assert (read.request_id, read.remote.request_id, read.remote.generation) == ("d-1", "p-1", "nonce0")
    assert tables(read.tables) == [(0, (9, 8, 7, 6))]
    assert tables(read.remote.tables) == [(0, (3, 4, 5, 6))]
    assert decode.matched_tokens(item, 0) == (0, False)


def test_only_missing_tokens_are_read_by_position():
    decode = side(engine_id="d")
    item = request("d-1", 200, handoff(200, (list(range(1, 8)),)))
    decode.on_new_request(item)
    assert decode.matched_tokens(item, 192) == (8, True)
    decode.allocated(item, (list(range(11, 18)),), 8)
    (read,) = decode.build_metadata().reads
    assert tables(read.tables) == [(192, (17,))]
    assert tables(read.remote.tables) == [(0, (1, 2, 3, 4, 5, 6, 7))]


def test_a_full_local_hit_reads_nothing_and_releases_once():
    decode = side(engine_id="d")
    item = request("d-1", 96, handoff(96, ([1, 2, 3],)))
    decode.on_new_request(item)
    assert decode.matched_tokens(item, 96) == (0, False)
    decode.allocated(item, ([4, 5, 6],), 0)
    decode.allocated(item, ([4, 5, 6],), 0)
    step = decode.build_metadata()
    assert [remote.request_id for remote in step.releases] == ["p-1"]
    assert not step.reads
    decode.request_finished(item, ([4, 5, 6],))
    assert not decode.build_metadata().releases


def test_an_abort_before_blocks_were_allocated_releases():
    decode = side(engine_id="d")
    item = request("d-1", 96, handoff(96, ([1, 2, 3],)))
    decode.on_new_request(item)
    assert finished(decode, item, ((),), status=RequestStatus.FINISHED_ABORTED) == (False, None)
    assert [remote.request_id for remote in decode.build_metadata().releases] == ["p-1"]
    # The server's synthetic one-token request, aborted at once, releases the same reference again.
    synthetic = request("d-2", 1, item.kv_transfer_params)
    decode.on_new_request(synthetic)
    finished(decode, synthetic, ((),), status=RequestStatus.FINISHED_ABORTED)
    assert [remote.request_id for remote in decode.build_metadata().releases] == ["p-1"]


def test_an_abort_while_loading_cancels_and_keeps_nothing():
    decode = side(engine_id="d")
    item = request("d-1", 96, handoff(96, ([1, 2, 3],)))
    decode.on_new_request(item)
    decode.matched_tokens(item, 0)
    decode.allocated(item, ([4, 5, 6],), 96)
    assert decode.build_metadata().reads
    assert finished(decode, item, ([4, 5, 6],), status=RequestStatus.FINISHED_ABORTED) == (False, None)
    step = decode.build_metadata()
    assert step.cancels == ["d-1"]
    assert not step.releases


def test_a_loaded_request_neither_cancels_nor_releases_when_it_ends():
    decode = side(engine_id="d")
    item = request("d-1", 96, handoff(96, ([1, 2, 3],)))
    decode.on_new_request(item)
    decode.matched_tokens(item, 0)
    decode.allocated(item, ([4, 5, 6],), 96)
    decode.build_metadata()
    decode.received({"d-1"})
    decode.allocated(item, ([4, 5, 6, 7],), 0)
    finished(decode, item, ([4, 5, 6, 7],))
    assert not decode.build_metadata()


def test_after_a_failed_load_the_request_is_local():
    decode = side(engine_id="d", recompute=True)
    item = request("d-1", 96, handoff(96, ([1, 2, 3],)))
    decode.on_new_request(item)
    decode.matched_tokens(item, 0)
    decode.allocated(item, ([4, 5, 6],), 96)
    decode.build_metadata()
    decode.received({"d-1"}, {"d-1"})
    assert decode.matched_tokens(item, 0) == (0, False)
    decode.allocated(item, ([4, 5, 6],), 0)
    assert not decode.build_metadata()


def test_parameters_that_cannot_be_used_fail_the_request_by_policy(caplog):
    broken = handoff(96, ([1, 2, 3],))
    del broken["remote_host"]
    failing = side(engine_id="d")
    item = request("d-1", 96, broken)
    failing.on_new_request(item)
    assert "remote_host" in caplog.text
    assert failing.matched_tokens(item, 0) == (96, True)
    failing.allocated(item, ([4, 5, 6],), 96)
    step = failing.build_metadata()
    assert list(step.failures) == ["d-1"]
    assert "remote_host" in step.failures["d-1"]
    assert not step.reads

    recomputing = side(engine_id="d", recompute=True)
    recomputing.on_new_request(item)
    assert recomputing.matched_tokens(item, 0) == (0, False)
    recomputing.allocated(item, ([4, 5, 6],), 0)
    assert not recomputing.build_metadata()


@pytest.mark.parametrize(
    "prompt,why",
    [
        ({"tokens": 96, "start": 1}, "differ from what was computed"),
        ({"tokens": 64}, "offers 96 tokens, the prompt has 64"),
    ],
)
def test_a_cache_of_another_prompt_is_never_loaded_but_released(prompt, why):
    decode = side(engine_id="d", recompute=True)
    params = handoff(96, ([1, 2, 3],))
    item = request("d-1", prompt.pop("tokens"), params, **prompt)
    decode.on_new_request(item)
    assert decode.matched_tokens(item, 0) == (0, False)
    decode.allocated(item, ([4, 5, 6],), 0)
    step = decode.build_metadata()
    assert not step.reads
    assert [remote.request_id for remote in step.releases] == ["p-1"]

    failing = side(engine_id="d")
    failing.on_new_request(item)
    failing.matched_tokens(item, 0)
    failing.allocated(item, ([4, 5, 6],), 96)
    assert why in failing.build_metadata().failures["d-1"]


def test_models_with_state_stop_one_token_early_on_both_sides():
    prefill, decode = side(STATE_GROUPS), side(STATE_GROUPS, engine_id="d")
    item = request("p-1", 100, TO_PREFILL)
    prefill.on_new_request(item)
    assert (item.num_prompt_tokens, len(item.prompt_token_ids), item.num_tokens, item.max_tokens) == (99, 99, 99, 1)
    _, params = finished(prefill, item, ([3, 4, 5, 6], [2]))
    assert params["remote_num_tokens"] == 99
    assert params["remote_block_ids"] == [[3, 4, 5, 6], [2]]
    there = request("d-1", 100, params)
    decode.on_new_request(there)
    assert there.num_prompt_tokens == 100
    assert decode.matched_tokens(there, 0) == (99, True)
    decode.allocated(there, ([9, 8, 7, 6], [5]), 99)
    (read,) = decode.build_metadata().reads
    assert tables(read.tables) == [(0, (9, 8, 7, 6)), (0, (5,))]


def test_a_state_after_another_number_of_tokens_is_never_loaded():
    params = handoff(100, ([3, 4, 5, 6], [2]), STATE_GROUPS)
    params["remote_num_tokens"] = 98
    decode = side(STATE_GROUPS, engine_id="d")
    item = request("d-1", 100, params)
    decode.on_new_request(item)
    decode.matched_tokens(item, 0)
    decode.allocated(item, ([9, 8, 7, 6], [5]), 98)
    step = decode.build_metadata()
    assert "state after 98 tokens" in step.failures["d-1"]
    assert not step.reads


def test_a_prompt_of_one_token_moves_no_state():
    params = handoff(1, ([3], [2]), STATE_GROUPS)
    decode = side(STATE_GROUPS, engine_id="d")
    item = request("d-1", 1, params)
    decode.on_new_request(item)
    assert decode.matched_tokens(item, 0) == (0, False)
    decode.allocated(item, ([9], [5]), 0)
    assert [remote.request_id for remote in decode.build_metadata().releases] == ["p-1"]


def test_position_indexed_states_and_speculative_scratch():
    # mamba_cache_mode "align": a block every 32 tokens, nulls before the running state, scratch behind it.
    groups = (STATE_GROUPS[0], STATE_GROUPS[1].__class__(1, 32, is_state=True))
    params = handoff(100, ([3, 4, 5, 6], [0, 0, 0, 8, 21, 22]), groups)
    assert params["remote_block_ids"][1] == [8]


def test_a_missing_state_block_is_not_offered(caplog):
    prefill = side(STATE_GROUPS)
    item = request("p-1", 100, TO_PREFILL)
    prefill.on_new_request(item)
    assert finished(prefill, item, ([3, 4, 5, 6], [0])) == (False, None)
    assert "no block holds the state" in caplog.text


def test_a_state_that_ran_ahead_of_the_prompt_is_not_offered(caplog):
    prefill = side(STATE_GROUPS)
    item = request("p-1", 100, TO_PREFILL)
    prefill.on_new_request(item)
    assert finished(prefill, item, ([3, 4, 5, 6], [2]), computed=100) == (False, None)
    assert "its state is that after 100 tokens, not after 99" in caplog.text


def test_null_blocks_before_a_window_become_positions():
    params = handoff(200, ([1, 2, 3, 4], [0, 0, 7, 8]), WINDOW_GROUPS)
    assert params["remote_block_ids"] == [[1, 2, 3, 4], [7, 8]]
    assert params["kvplan"]["first_tokens"] == [0, 128]
    decode = side(WINDOW_GROUPS, engine_id="d")
    item = request("d-1", 200, params)
    decode.on_new_request(item)
    decode.matched_tokens(item, 0)
    decode.allocated(item, ([11, 12, 13, 14], [0, 0, 17, 18]), 199)
    (read,) = decode.build_metadata().reads
    assert tables(read.tables) == [(0, (11, 12, 13, 14)), (128, (17, 18))]
    # The last token of the prompt, 199, sees the 63 tokens before it.
    assert [table.needed_from for table in read.tables] == [None, 136]


def test_a_window_model_keeps_the_token_that_its_window_is_about_to_leave():
    # Window 64, prompt 191: its last token sees [127, 190], but once that token is computed vLLM keeps [128, ...) only.
    prefill, decode = side(WINDOW_GROUPS), side(WINDOW_GROUPS, engine_id="d")
    item = request("p-1", 191, TO_PREFILL)
    prefill.on_new_request(item)
    assert item.num_prompt_tokens == 190
    _, params = finished(prefill, item, ([1, 2, 3], [0, 7, 8]))
    there = request("d-1", 191, params)
    decode.on_new_request(there)
    assert decode.matched_tokens(there, 0) == (190, True)
    decode.allocated(there, ([4, 5, 6], [0, 9, 10]), 190)
    (read,) = decode.build_metadata().reads
    assert tables(read.tables) == [(0, (4, 5, 6)), (64, (9, 10))]
    assert read.tables[1].needed_from == 127


def test_half_filled_blocks_leave_the_prefix_cache_once_vllm_put_them_there():
    # The producer's blocks of 32 begin at token 160; the reader's block of 64 at token 128 misses [128, 160).
    evicted = []
    decode = side(WINDOW_GROUPS, engine_id="d", evict=lambda ids: evicted.append(set(ids)))
    params = handoff(200, ([1, 2, 3, 4], [0, 0, 7, 8]), WINDOW_GROUPS)
    params["kvplan"]["first_tokens"] = [0, 160]
    item = request("d-1", 200, params)
    decode.on_new_request(item)
    decode.matched_tokens(item, 0)
    decode.allocated(item, ([11, 12, 13, 14], [0, 0, 17, 18]), 199)
    decode.build_metadata()
    assert evicted == []
    decode.received({"d-1"})
    decode.allocated(item, ([11, 12, 13, 14], [0, 0, 17, 18]), 0)
    assert evicted == [{17}]
    decode.build_metadata()
    assert evicted == [{17}]


def test_of_n_siblings_one_reads_and_the_reference_is_released_by_nobody_else():
    decode = side(engine_id="d")
    params = handoff(96, ([1, 2, 3],))
    items = [request(f"{index}_d-1", 96, params) for index in range(4)]
    for item in items:
        decode.on_new_request(item)
    assert decode.matched_tokens(items[0], 0) == (96, True)
    decode.allocated(items[0], ([4, 5, 6],), 96)
    assert [decode.matched_tokens(item, 0) for item in items[1:]] == [(None, False)] * 3
    finished(decode, items[3], ((),), status=RequestStatus.FINISHED_ABORTED)
    step = decode.build_metadata()
    assert (len(step.reads), step.releases) == (1, [])
    decode.received({"0_d-1"})
    for item in items[1:3]:
        assert decode.matched_tokens(item, 64) == (0, False)
        decode.allocated(item, ([4, 5, 7],), 0)
    for item in items[:3]:
        finished(decode, item, ([4, 5, 6],))
    assert not decode.build_metadata()


def test_siblings_that_all_go_release_once():
    decode = side(engine_id="d")
    params = handoff(96, ([1, 2, 3],))
    items = [request(f"{index}_d-1", 96, params) for index in range(3)]
    for item in items:
        decode.on_new_request(item)
    for item in items:
        finished(decode, item, ((),), status=RequestStatus.FINISHED_ABORTED)
    assert len(decode.build_metadata().releases) == 1


def test_waiting_requests_are_renewed_once_a_heartbeat():
    clock = Clock()
    decode = side(engine_id="d", clock=clock, heartbeat_s=5.0)
    item = request("d-1", 96, handoff(96, ([1, 2, 3],)))
    decode.on_new_request(item)
    assert [remote.request_id for remote in decode.build_metadata().renewals] == ["p-1"]
    clock.now += 4.9
    assert not decode.build_metadata().renewals
    clock.now += 0.1
    assert decode.build_metadata().renewals
    decode.matched_tokens(item, 0)
    decode.allocated(item, ([4, 5, 6],), 96)
    clock.now += 5
    assert not decode.build_metadata().renewals


def test_a_producer_does_not_read():
    decode = side(engine_id="d", is_consumer=False)
    item = request("d-1", 96, handoff(96, ([1, 2, 3],)))
    decode.on_new_request(item)
    decode.matched_tokens(item, 0)
    decode.allocated(item, ([4, 5, 6],), 96)
    assert "kv_producer" in decode.build_metadata().failures["d-1"]


def test_block_lists_that_are_too_short_fail_the_request():
    decode = side(engine_id="d")
    item = request("d-1", 96, handoff(96, ([1, 2, 3],)))
    decode.on_new_request(item)
    decode.matched_tokens(item, 0)
    decode.allocated(item, ([4, 5],), 96)
    step = decode.build_metadata()
    assert "2 blocks of 32 tokens for 96 tokens" in step.failures["d-1"]
    assert [remote.request_id for remote in step.releases] == ["p-1"]
