"""What to do about each reason of a failure, and the log line that says so. No states, no decisions.

A log line about a failure is one line of logfmt: an event, then ``key=value`` with values quoted where needed, so that
a person can read it and a log store can query it.
"""

from __future__ import annotations

import json

ADVICE = {
    "aborted": "nothing: the client left, or the engine gave the request up",
    "bind_failed": "compare block sizes and groups of both engines (kvplan check); a router must not edit block tables",
    "claim_unanswered": "look at the producer with kvplan top: is its process stopped, or its host overloaded?",
    "claimed_by_another": "let the router send every prefill result to one decode engine, once",
    "closing": "nothing: this engine is shutting down; send requests elsewhere",
    "digest_mismatch": "keep the detail; docs/operations.md, Verify, says what it points to",
    "engine_restarted": "nothing for new requests; this one's cache went with the old process",
    "expired": "the request waited too long for a decode engine: add decode capacity, or raise lease_s at the producer",
    "handshake_failed": "run kvplan check on both engines; install the same kvplan on both sides",
    "handshake_timeout": "check that the address is reachable from here, the port open, and the key the same",
    "incompatible": "run kvplan check: it names each field that differs and what would work",
    "lease_lost": "the network or the producer stalled for longer than extension_s: look at both hosts' load",
    "not_elected": "install the same kvplan on both sides: they compute different plans",
    "overloaded": "send less to this engine, or raise the limit that the detail names",
    "peer_gone": "nothing for new requests if it was restarted; else look why the process ended",
    "peer_not_allowed": "add the peer to allowed_peers, or find out who sent that reference",
    "refused": "read the detail; install the same kvplan on both sides",
    "released": "let the router send every prefill result to one decode engine, once",
    "stale_generation": "let the router drop old parameters when it retries a prefill",
    "tables_differ": "let the router pass kv_transfer_params through unchanged",
    "transfer_timeout": "the link is slower than the request is large: run kvplan bench, or raise transfer_timeout_s",
    "transport_error": "read the detail; check the fabric (NIXL and UCX logs), the driver and memory limits",
    "unknown": "let the router send parameters to the engine that made them, once, and soon",
    "verify_failed": "look at the producer with kvplan top; lower verify_rate, or raise verify_timeout_s",
    "verify_unsupported": "install the same kvplan on both sides, or set verify_rate to 0",
    "withdrawn": "nothing: the prefill request was aborted",
}
"""By reason of ``nouns.REASONS``: what a person, or a router, should do."""

GENERAL = "read the detail"


def advice(reason: str) -> str:
    """Return what to do about a reason."""
    return ADVICE.get(reason, GENERAL)


def logfmt(event: str, **fields: object) -> str:
    """Return one log line.

    >>> logfmt("read failed", reason="expired", detail="the lease ended", peer="")
    'read failed reason=expired detail="the lease ended" peer=""'
    """
    return " ".join([event, *(f"{name}={_value(value)}" for name, value in fields.items())])


def _value(value: object) -> str:
    """Return a value as it is when it is one plain word, else quoted, in one line whatever is in it."""
    text = str(value)
    plain = text.isascii() and text.isprintable() and text and not set(text) & set(' ="\\')
    return text if plain else json.dumps(text)
