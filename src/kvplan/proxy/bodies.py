"""What a router changes in a request's body, as functions of values. No HTTP here.

A request goes to a prefill engine with one token to make and the wish that its cache is kept; the `kv_transfer_params`
of the answer go into the request for the decode engine unchanged. This is how routers for vLLM's NIXL connector do it
(vLLM 0.32), so engines with either connector can stand behind this one.
"""

from __future__ import annotations

from typing import Any

__all__ = ["decode_body", "is_for_decode_alone", "prefill_body"]

_KEEP_FOR_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_ONLY_FOR_DECODE = ("stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs")


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body for the prefill engine: one token, not streamed, cache kept.

    >>> prefill_body({"prompt": "a", "max_tokens": 9, "stream": True, "n": 2})["max_tokens"]
    1
    """
    kept = {name: value for name, value in body.items() if name not in _ONLY_FOR_DECODE}
    one_token = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in body} or {"max_tokens": 1}
    return kept | one_token | {"stream": False, "kv_transfer_params": dict(_KEEP_FOR_DECODE)}


def decode_body(body: dict[str, Any], transfer: dict[str, Any] | None) -> dict[str, Any]:
    """The body for the decode engine: the client's, with what the prefill engine said; None says that it kept nothing.

    >>> decode_body({"prompt": "a", "max_tokens": 9}, {"remote_port": 5600})["kv_transfer_params"]
    {'remote_port': 5600}
    """
    without = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    return without if transfer is None else without | {"kv_transfer_params": transfer}


def is_for_decode_alone(body: dict[str, Any]) -> bool:
    """Whether one transfer cannot serve this request: several prompts in one body, or scores of the prompt's tokens.

    >>> is_for_decode_alone({"prompt": ["one", "two"]}), is_for_decode_alone({"prompt": [5, 6]})
    (True, False)
    """
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt)
    return several or bool(body.get("echo")) or body.get("prompt_logprobs") is not None
