"""Real vLLM requests, and both ends of a handoff."""

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvplan.vllm.groups import Group
from kvplan.vllm.scheduler import EngineFacts, SchedulerSide

TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's routers send to the prefill engine."""

ONE_GROUP = (Group(0, 32),)
STATE_GROUPS = (Group(0, 32), Group(1, 4096, is_state=True))
WINDOW_GROUPS = (Group(0, 64), Group(1, 64, window=64))


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def request(request_id, tokens, params=None, *, start=0):
    extra = {"kv_transfer_params": params} if params is not None else None
    return Request(
        request_id,
        [start + 5 + index for index in range(tokens)],
        SamplingParams(max_tokens=4, extra_args=extra),
        None,
    )


def side(groups=ONE_GROUP, *, engine_id="p", evict=None, clock=None, **facts):
    numbers = iter(range(1000))
    return SchedulerSide(
        EngineFacts(engine_id=engine_id, host="10.0.0.1", port=5600, groups=groups, **facts),
        evict=evict,
        clock=clock or Clock(),
        nonce=lambda: f"nonce{next(numbers)}",
    )


def finished(prefill, item, block_ids, *, computed=None, status=RequestStatus.FINISHED_LENGTH_CAPPED):
    """Let a prefill request end; return (keep the blocks, parameters for the router)."""
    item.num_computed_tokens = item.num_prompt_tokens if computed is None else computed
    item.status = status
    return prefill.request_finished(item, block_ids)


def handoff(tokens, block_ids, groups=ONE_GROUP, *, prefill=None, request_id="p-1", **extra):
    """Return the parameters that a prefill engine answers with."""
    prefill = prefill or side(groups)
    item = request(request_id, tokens, TO_PREFILL | extra)
    prefill.on_new_request(item)
    keep, params = finished(prefill, item, block_ids)
    assert keep
    return params
