"""``kv_transfer_params``: the dictionary that a router carries from the prefill engine to the decode engine. No state.

Three dictionaries occur (the first two as vLLM's NIXL connector has them, so that its routers work unchanged):

1. Router to prefill: ``{"do_remote_decode": true, "do_remote_prefill": false, "remote_...": null}``.
2. Prefill to router to decode: ``{"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": ...,
   "remote_host": ..., "remote_port": ..., "remote_request_id": ..., "remote_block_ids": [[...], ...],
   "remote_num_tokens": ..., "tp_size": ..., "pp_size": ..., "dcp_size": ..., "transfer_mode": "pull",
   "kvplan": {...}}``.
3. ``kvplan`` inside it: ``{"schema": 1, "generation": ..., "first_tokens": [...], "lease_s": ...,
   "prompt_digest": ...}``: what token alignment, reuse detection and the check of the prompt need.

Unknown keys are kept (the prefill side returns those that it was given) and ignored. What a router may have broken
raises ``ParamsError``; the caller turns it into a failed load, never into an exception of the engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.errors import DescriptionError
from kvplan.planner import BlockTable
from kvplan.session import RemoteRef
from kvplan.vllm.settings import WILDCARDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCHEMA = 1
KEY = "kvplan"

MAX_GROUPS = 64
MAX_BLOCKS = 1 << 20
MAX_TOKENS = 1 << 40
MAX_TEXT = 512

_REMOTE_KEYS = (
    "do_remote_decode",
    "do_remote_prefill",
    "remote_block_ids",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_request_id",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
    "tp_size",
    "pp_size",
    "dcp_size",
    KEY,
)


class ParamsError(DescriptionError):
    """The parameters of a request cannot be used."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the decode side reads out of the parameters."""

    remote: RemoteRef
    lease_s: float
    prompt_digest: str
    """Digest of the ``remote.num_tokens`` tokens whose cache is offered; empty when the producer could not say."""

    @property
    def first_kept_token(self) -> int:
        """The first token that every attention group of the producer still holds."""
        return max((table.first_token for table in self.remote.tables), default=0)


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Return whether the request's cache is to be read from a prefill engine."""
    return bool(params) and bool(params.get("do_remote_prefill"))  # type: ignore[union-attr]


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Return whether the request's cache is to be kept for a decode engine."""
    return bool(params) and bool(params.get("do_remote_decode"))  # type: ignore[union-attr]


def prompt_digest(token_ids: Sequence[int] | None, num_tokens: int, adapter: str = "") -> str:
    """Return a digest of the first ``num_tokens`` token ids and the adapter's name; empty without token ids.

    >>> prompt_digest([1, 2, 3], 2) == prompt_digest([1, 2, 9], 2) != prompt_digest([1, 2], 2, "lora")
    True
    """
    if token_ids is None or len(token_ids) < num_tokens:
        return ""
    digest = hashlib.blake2b(adapter.encode(), digest_size=16)
    digest.update(np.asarray(token_ids[:num_tokens], dtype="<i8").tobytes())
    return digest.hexdigest()


def encode(handoff: Handoff, given: Mapping[str, Any], *, tp: int, pp: int, dcp: int) -> dict[str, Any]:
    """Return the parameters that the prefill engine answers with; unknown keys of ``given`` are kept."""
    remote = handoff.remote
    extra = {key: value for key, value in given.items() if key not in _REMOTE_KEYS and not key.startswith("_")}
    return extra | {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": remote.engine_id,
        "remote_request_id": remote.request_id,
        "remote_host": remote.host,
        "remote_port": remote.port,
        "remote_block_ids": [list(table.block_ids) for table in remote.tables],
        "remote_num_tokens": remote.num_tokens,
        "remote_blocks_expiry_time": None,
        "tp_size": tp,
        "pp_size": pp,
        "dcp_size": dcp,
        "transfer_mode": "pull",
        KEY: {
            "schema": SCHEMA,
            "generation": remote.generation,
            "first_tokens": [table.first_token for table in remote.tables],
            "lease_s": handoff.lease_s,
            "prompt_digest": handoff.prompt_digest,
        },
    }


def decode(params: Mapping[str, Any]) -> Handoff:
    """Return what the decode side needs, every value checked. Raises ``ParamsError`` that names the key."""
    own = params.get(KEY)
    if not isinstance(own, dict):
        raise ParamsError(f"{KEY} is missing: the prefill engine does not run KVPlanConnector", field=KEY)
    if own.get("schema") != SCHEMA:
        raise ParamsError(f"{KEY}.schema is {own.get('schema')!r}; this kvplan reads {SCHEMA}", field=f"{KEY}.schema")
    host = _text(params, "remote_host")
    if host in WILDCARDS:
        raise ParamsError(f"remote_host is {host!r}, which no peer can reach", field="remote_host")
    remote = RemoteRef(
        engine_id=_text(params, "remote_engine_id"),
        host=host,
        port=_whole(params, "remote_port", 1, 65535),
        request_id=_text(params, "remote_request_id"),
        generation=_text(own, "generation"),
        tables=_tables(params, own),
        num_tokens=_whole(params, "remote_num_tokens", 1, MAX_TOKENS),
    )
    digest = own.get("prompt_digest", "")
    return Handoff(remote, _seconds(own, "lease_s"), digest if isinstance(digest, str) else "")


def _tables(params: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[BlockTable, ...]:
    lists, firsts = params.get("remote_block_ids"), own.get("first_tokens")
    if not isinstance(lists, list | tuple) or not 0 < len(lists) <= MAX_GROUPS:
        raise ParamsError("remote_block_ids is not a list of block id lists, one per group", field="remote_block_ids")
    if not isinstance(firsts, list | tuple) or len(firsts) != len(lists):
        raise ParamsError(f"{KEY}.first_tokens does not name one token per group", field=f"{KEY}.first_tokens")
    tables = []
    for ids, first in zip(lists, firsts, strict=True):
        if not isinstance(ids, list | tuple) or len(ids) > MAX_BLOCKS or not all(_is_whole(item, -1) for item in ids):
            raise ParamsError("remote_block_ids holds something else than block ids", field="remote_block_ids")
        if not _is_whole(first, 0):
            raise ParamsError(f"{KEY}.first_tokens holds {first!r}", field=f"{KEY}.first_tokens")
        tables.append(BlockTable(first, tuple(ids)))
    return tuple(tables)


def _is_whole(value: object, low: int, high: int = MAX_TOKENS) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _whole(source: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """Return a whole number; routers may have turned it into text."""
    value = source.get(key)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not _is_whole(value, low, high):
        raise ParamsError(f"{key} is {value!r}; it must be a whole number in [{low}, {high}]", field=key)
    return int(value)  # type: ignore[arg-type]


def _text(source: Mapping[str, Any], key: str) -> str:
    value = source.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise ParamsError(f"{key} is {_short(value)}; it must be text of 1 to {MAX_TEXT} characters", field=key)
    return value


def _seconds(source: Mapping[str, Any], key: str) -> float:
    value = source.get(key, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ParamsError(f"{key} is {_short(value)}; it must be a number of seconds", field=key)
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
