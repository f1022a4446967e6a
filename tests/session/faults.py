"""The faults that are played between real processes: what must come of each, and how soon. Also how to look at it.

The table is the one in docs/design-notes.md. Bounds are those of the settings in ``tests.session.engines.QUICK``, plus
two seconds for a slow machine; what they follow from stands beside them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from tests.session.engines import QUICK, wait_until

SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the table."""

    what: str
    comes_of_it: str
    within: str
    """What bounds it, in words of the settings."""
    bound_s: float
    """The same in the tests."""
    tests: str
    """Prefix of the names of its tests."""
    on_engines: bool = False
    """Whether it is played on vLLM engines too."""


def _fault(what, comes_of_it, within, seconds, tests, on_engines=False):
    return Fault(what, comes_of_it, within, seconds + SLACK_S, tests, on_engines)


FAULTS = {
    "F1": _fault("a request id that the producer does not know", "`unknown`", "claim_park_s",
                 QUICK.claim_park_s, "test_f1_"),
    "F2": _fault("block ids out of range, or other than those offered", "`bind_failed`, `tables_differ`", "at once",
                 0, "test_f2_"),
    "F3": _fault("a reference used twice", "one read `received`, the other `claimed_by_another` or `released`",
                 "at once", 0, "test_f3_"),
    "F4": _fault("the producer has reused the blocks, before a read or during it",
                 "`expired`, `withdrawn`, `lease_lost`", "lease_s, extension_s", QUICK.extension_s, "test_f4_", True),
    "F5": _fault("a read after the lease", "`expired`", "at once", 0, "test_f5_", True),
    "F6": _fault("the producer is killed with -9 in the middle of a read", "`peer_gone` or `transport_error`",
                 "hello_timeout_s, and until the last write has ended", QUICK.hello_timeout_s, "test_f6_", True),
    "F7": _fault("a producer is killed and restarted on its address",
                 "the next request is `received`; old references: `engine_restarted`, `peer_gone`",
                 "hello_timeout_s", QUICK.hello_timeout_s, "test_f6_f7_", True),
    "F8": _fault("a consumer is killed with -9 while it holds claims", "the blocks come back", "lease_s, extension_s",
                 QUICK.extension_s, "test_f8_", True),
    "F9": _fault("a request is aborted, on either side, in every state", "`aborted`, `withdrawn`; the blocks come back",
                 "at once, and when the last write has ended", 0, "test_f9_", True),
    "F10": _fault("a done is lost, repeated, or comes before its offer", "the blocks come back, once",
                  "resend_s; extension_s if it is lost for ever", QUICK.extension_s, "test_f10_"),
    "F11": _fault("noise, truncated frames, wrong versions, 1,000 connections, slow loris", "nothing: requests go on",
                  "not delayed", 0, "test_f11_", True),
    "F12": _fault("a stranger without the key, or with another cluster's; replays",
                  "never heard (`handshake_timeout` on their side); replays change nothing", "handshake_timeout_s",
                  QUICK.handshake_timeout_s, "test_f12_"),
    "F13": _fault("transport errors at post, at poll, at release",
                  "read again within read_retries, then `transport_error`", "at once", 0, "test_f13_"),
    "F14": _fault("staging, queues, or the room for reads, offers or claims are full",
                  "`overloaded`, or it waits its turn", "at once", 0, "test_f14_"),
    "F15": _fault("shutdown of either side with reads outstanding",
                  "`closing`; the other side: `peer_gone`, `lease_lost`",
                  "close_timeout_s on this side, extension_s on the other",
                  QUICK.close_timeout_s + QUICK.extension_s, "test_f15_"),
    "F16": _fault("a peer's layout lies: addresses outside its regions, counts, indices, overlaps",
                  "`handshake_failed`, `incompatible`, `transport_error`; no write outside the request's blocks",
                  "at once", 0, "test_f16_"),
}  # fmt: skip


def table():
    """The lines of the table in the documentation."""
    rows = [
        f"| {name} | {one.what} | {one.comes_of_it} | {one.within} | `{one.tests}*`{' (v)' if one.on_engines else ''} |"
        for name, one in FAULTS.items()
    ]
    return ["| | fault | what comes of it | within | tests |", "|---|---|---|---|---|", *rows]


@contextlib.contextmanager
def bounded(name, *engines, times=1):
    """The block plays a fault so often at once, or one after the other; then all is over in time and all is well."""
    started = time.monotonic()
    yield
    took_s = time.monotonic() - started
    for engine in engines:
        check_well(engine)
    bound_s = FAULTS[name].bound_s * times
    if took_s >= bound_s:
        raise AssertionError(f"{name} took {took_s:.2f} s, its bound is {bound_s:.2f} s")


def check_well(engine):
    """No thread has died, nothing is held that should be free, and every failure was reported, counted and logged."""
    ends_at = time.monotonic() + 5.0
    while True:
        health = engine.call("health")
        held = {name: health[name] for name in ("live_offers", "live_reads", "quarantined") if health[name]}
        if not held:
            break
        if time.monotonic() > ends_at:
            raise AssertionError(f"{engine.name} holds {held}")
        time.sleep(0.005)
    if health["threads"] != health["all_threads"] or health["loop_errors"]:
        raise AssertionError(f"{engine.name} is not well: {health}")
    reported, counted, logged = engine.call("ledger")
    if not reported == counted == logged:
        raise AssertionError(f"{engine.name} reported {reported}, counted {counted}, logged {logged}")


def one_request(prefill, decode, name, *, num_tokens=24, source=None, destination=None, remote=None):
    """One request goes from engine to engine, and arrives right."""
    source = source or prefill.table(num_tokens)
    destination = destination or decode.table(num_tokens, first_block=2)
    prefill.call("fill", source)
    decode.call("wipe")
    offered = prefill.call("offer", name, source, num_tokens)
    decode.call("read", f"local-{name}", remote or offered, destination)
    decode.wait("received", f"local-{name}")
    decode.call("check", destination, num_tokens)
    prefill.wait("sent", name)


def reasons(engine, request_id, **options):
    """Why a read failed, as a set over the ranks; ``received`` stands for success."""
    return set(engine.wait("failures", request_id, **options))


def until(condition, bound_s=10.0, what=lambda: "condition"):
    """Wait until something has come about; ``what`` says what is so instead."""
    try:
        wait_until(condition, bound_s)
    except AssertionError:
        raise AssertionError(f"did not come true within {bound_s} s: {what()}") from None
