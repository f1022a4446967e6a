"""Thousands of requests with random faults between processes: zero wrong, zero leaked, zero deaths, memory flat.

Twenty minutes in the long run; ``KVPLAN_SOAK_S`` sets another duration. A short round runs every time.
"""

import os
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.session.engines import D_SHAPE, NUM_BLOCKS, P_SHAPE, QUICK
from tests.session.processes import EngineProcess

TOKENS = 12
SOAK_S = float(os.environ.get("KVPLAN_SOAK_S", "1200"))
CONFIG = replace(QUICK, lease_s=2.0, max_post_bytes=512)


class Soak:
    """A producer that is restarted now and then, a consumer that must survive, and requests in between."""

    def __init__(self, transport, seed):
        self.dice = random.Random(seed)
        self.transport = transport
        self.outcomes = Counter()
        self.turn = self.restarts = 0
        self.decode = EngineProcess("decode-0", D_SHAPE, transport=transport, config=CONFIG)
        self.prefill = self.start_prefill(0)

    def start_prefill(self, port):
        self.restarts += 1
        name = f"prefill-{self.restarts}"
        return EngineProcess(name, P_SHAPE, transport=self.transport, config=CONFIG, port=port)

    def close(self):
        self.decode.close()
        self.prefill.close()

    def batch(self):
        """A few requests at once, each disturbed by one fault or none; ends when all of them have ended."""
        prefill, decode, dice = self.prefill, self.decode, self.dice
        self.turn += 1
        first = dice.randrange(1, NUM_BLOCKS - 3)
        source = prefill.table(TOKENS, first_block=first)
        prefill.call("fill", source)
        decode.call("wipe")
        names = [f"{self.turn}-{i}" for i in range(dice.randrange(1, 5))]
        faults = {
            name: dice.choice(["none"] * 4 + ["cancel", "withdraw", "expire", "unknown", "twice"]) for name in names
        }
        for i, name in enumerate(names):
            self.request(name, faults[name], source, decode.table(TOKENS, first_block=1 + 2 * i))
        freeze = dice.random() < 0.03
        if freeze:
            with dice.choice([prefill, decode]).frozen():
                time.sleep(dice.random())
        for i, name in enumerate(names):
            self.conclude(name, faults[name], decode.table(TOKENS, first_block=1 + 2 * i), disturbed=freeze)
        if dice.random() < 0.01:
            self.prefill.kill()
            self.prefill.close()
            self.prefill = self.start_prefill(prefill.port)

    def request(self, name, fault, source, destination):
        prefill, decode = self.prefill, self.decode
        if fault == "unknown":
            remote = prefill.call("reference", name, source, TOKENS)
        else:
            remote = prefill.call("offer", name, source, TOKENS, lease_s=0.02 if fault == "expire" else 0.0)
        if fault == "expire":
            time.sleep(0.03)
        decode.call("read", f"local-{name}", remote, destination)
        if fault == "twice":
            decode.call("read", f"second-{name}", remote, destination)
        if fault in {"cancel", "withdraw"}:
            time.sleep(self.dice.random() * 0.01)
            (decode if fault == "cancel" else prefill).call(fault, f"local-{name}" if fault == "cancel" else name)
        if fault == "cancel":
            decode.call("release", remote)

    def conclude(self, name, fault, destination, *, disturbed):
        prefill, decode = self.prefill, self.decode
        reasons = set(decode.wait("failures", f"local-{name}", bound_s=30.0))
        self.outcomes.update(reasons)
        if fault == "twice":
            decode.wait("failures", f"second-{name}", bound_s=30.0)
        if reasons == {"received"}:
            assert decode.call("holds", destination, TOKENS), f"{name} ({fault}) is wrong"
        if fault in {"none", "twice"} and not disturbed:
            assert reasons == {"received"}, f"{name} ({fault}): {reasons}"
        if fault != "unknown":
            prefill.wait("sent", name, bound_s=CONFIG.lease_s + 5.0)


def run(transport, seed, duration_s):
    soak = Soak(transport, seed)
    try:
        soak.batch()
        early = soak.decode.call("health")
        ends_at = time.monotonic() + duration_s
        while time.monotonic() < ends_at:
            soak.batch()
            if soak.turn == 200:
                early = soak.decode.call("health")
        time.sleep(CONFIG.extension_s + 1.0)
        late = soak.decode.call("health")
        print(f"{soak.turn} batches, {soak.restarts} producers: {dict(soak.outcomes)}; {early} -> {late}")
        assert (late["threads"], late["loop_errors"], late["live_reads"], late["quarantined"]) == (6, 0, 0, 0)
        assert soak.prefill.call("health")["live_offers"] == 0
        return early, late
    finally:
        soak.close()


@pytest.mark.parametrize("transport", ["cma", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_a_short_soak(transport):
    run(transport, seed=7, duration_s=3.0)


@pytest.mark.long
@pytest.mark.nixl
@pytest.mark.timeout(SOAK_S + 300)
def test_a_long_soak_keeps_memory_flat():
    early, late = run("nixl", seed=time.time_ns(), duration_s=SOAK_S)
    assert late["resident_kib"] < early["resident_kib"] * 1.25 + 20_000
