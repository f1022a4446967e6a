"""Asking engines over HTTP: completions with token ids, the two halves of a P/D request, metrics.

The two halves are what routers for vLLM's NIXL connector send: prefill gets `do_remote_decode` and one token to make,
answers with `kv_transfer_params`, and those go into the decode request unchanged.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvplan.engines.prompts import completion_body
from kvplan.errors import EngineError

__all__ = [
    "Answer",
    "complete",
    "external_tokens",
    "http_client",
    "prefill",
    "prefill_and_decode",
    "read_metrics",
    "total",
]

REQUEST_TIMEOUT_S = 120.0

ASK_FOR_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The `kv_transfer_params` of a prefill request (vLLM 0.32, NIXL connector)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine generated."""

    token_ids: tuple[int, ...]
    elapsed_s: float
    kv_transfer_params: Mapping[str, Any] | None = None
    smallest_gap: float = 0.0
    """The smallest distance of the two best tokens over all steps, in nats; 0 when `logprobs=2` was not asked for."""


@functools.cache
def http_client() -> httpx.Client:
    """One client for all engines of this process: making one costs more than a request. Usable from any thread."""
    return httpx.Client(limits=httpx.Limits(max_connections=64, keepalive_expiry=2.0), trust_env=False)


def complete(
    url: str, prompt: list[int], *, num_tokens: int, timeout_s: float = REQUEST_TIMEOUT_S, **fields: Any
) -> Answer:
    """The greedy continuation of a prompt by `num_tokens` tokens; EngineError when the answer is not one."""
    begin = time.monotonic()
    body = completion_body(prompt, num_tokens=num_tokens, **fields)
    try:
        response = http_client().post(f"{url}/v1/completions", json=body, timeout=timeout_s)
    except httpx.HTTPError as error:
        raise EngineError(f"{url} did not answer a completion: {type(error).__name__}: {error}") from error
    if response.status_code != httpx.codes.OK:
        raise EngineError(f"{url} answered HTTP {response.status_code}: {response.text[:500]}")
    reply = response.json()
    choice = reply["choices"][0]
    elapsed_s = time.monotonic() - begin
    return Answer(tuple(choice["token_ids"]), elapsed_s, reply.get("kv_transfer_params"), _smallest_gap(choice))


def prefill(url: str, prompt: list[int]) -> Mapping[str, Any]:
    """Lets a prefill engine compute a prompt's cache and keep it; returns the parameters for the decode request."""
    answer = complete(url, prompt, num_tokens=1, kv_transfer_params=ASK_FOR_DECODE)
    if not answer.kv_transfer_params:
        raise EngineError(f"{url} answered a prefill request without kv_transfer_params: has it a connector?")
    return answer.kv_transfer_params


def prefill_and_decode(prefill_url: str, decode_url: str, prompt: list[int], *, num_tokens: int) -> Answer:
    """One prompt through both engines, as a router would send it."""
    return complete(decode_url, prompt, num_tokens=num_tokens, kv_transfer_params=dict(prefill(prefill_url, prompt)))


def read_metrics(url: str) -> dict[str, float]:
    """The samples of an engine's `/metrics`, summed over engines and ranks, by name and remaining labels.

    A key is `name` or `name{label=value,...}` with sorted labels, without `engine` and `model_name`.
    """
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(http_client().get(f"{url}/metrics", timeout=10.0).text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                key = _key(sample.name, sample.labels)
                values[key] = values.get(key, 0.0) + sample.value
    return values


def external_tokens(metrics: Mapping[str, float]) -> int:
    """How many prompt tokens an engine got from another engine's cache, not by computing.

    `external_prefix_cache_hits` would not do: it counts failed loads too.
    """
    return int(metrics.get("vllm:prompt_tokens_by_source_total{source=external_kv_transfer}", 0.0))


def total(metrics: Mapping[str, float], name: str) -> float:
    """The sum of all samples of this name, whatever their labels."""
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


def _smallest_gap(choice: Mapping[str, Any]) -> float:
    steps = (choice.get("logprobs") or {}).get("top_logprobs") or []
    best = (sorted(step.values(), reverse=True)[:2] for step in steps)
    return min((pair[0] - pair[1] for pair in best if len(pair) == 2), default=0.0)


def _key(name: str, labels: Mapping[str, str]) -> str:
    rest = sorted((label, value) for label, value in labels.items() if label not in {"engine", "model_name"})
    return name + ("{" + ",".join(f"{label}={value}" for label, value in rest) + "}" if rest else "")
