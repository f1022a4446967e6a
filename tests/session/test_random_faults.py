"""Random faults, replayable: whatever is lost, repeated, late, cancelled, restarted, nothing wrong is called success.

The town reuses blocks the moment a rank reports them: freed producer blocks are overwritten at once, and reported
consumer blocks get a pattern that must stay. So a read that is late, a write that is late, and a block that is reported
too early all become visible as wrong bytes. In the end, when faults stop, everything must come to rest and be free.
"""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplan.planner import BlockTable
from kvplan.testing.oracle import elements
from kvplan.transport.base import State
from tests.session.engines import NUM_BLOCKS, P_SHAPE
from tests.session.town import Town

TOKENS = 12
P_BLOCKS, D_BLOCKS = 3, 2
REUSED, FREE = 0x55, 0x11
MESSAGES = ["Claim", "Granted", "Refused", "Renew", "Renewed", "Done", "DoneAck", "Release", "Released", "Introduce",
            "Introduced", "Hello", "HelloRequest", "Digest", "Digested", "DigestRefused"]  # fmt: skip


def fill_blocks(memory, block_ids, value):
    for region, held in zip(memory.rank.regions, memory.bytes, strict=True):
        for block in block_ids:
            held[block * region.block_stride_bytes : (block + 1) * region.block_stride_bytes] = value


def holds_only(memory, block_ids, value):
    return all(
        (held[block * region.block_stride_bytes : (block + 1) * region.block_stride_bytes] == value).all()
        for region, held in zip(memory.rank.regions, memory.bytes, strict=True)
        for block in block_ids
    )


def holds_the_cache(memory, tables):
    return all(
        np.array_equal(
            memory.bytes[e.region][e.offset : e.offset + len(e.value)], np.frombuffer(e.value, np.uint8)
        )
        for e in elements(memory.rank, tables)
    )  # fmt: skip


class Faults(RuleBasedStateMachine):
    verify_rate = 0.0

    @initialize(staged=st.booleans(), retries=st.integers(0, 1))
    def build(self, staged, retries):
        self.town = Town(
            staging_bytes=(1 << 15 if staged else 0), staging_slots=2, read_retries=retries, max_post_bytes=256,
            verify_rate=self.verify_rate,
        )  # fmt: skip
        self.prefill, self.decode = self.town.pair()
        self.next = 0
        self.restarts = 0
        self.offers = {}
        """Request id to (engine, block ids, ranks that have not reported)."""
        self.reads = {}
        """Local id to (block ids, ranks that have not reported)."""
        self.references = []
        self.lossy = {}
        self.town.faults = self.fault
        for memory in self.decode.memories:
            fill_blocks(memory, range(NUM_BLOCKS), FREE)

    def fault(self, sender, to, message):
        kind = type(message).__name__
        return self.lossy.get(kind)

    def free(self, taken, count):
        used = {block for ids in taken for block in ids}
        left = [block for block in range(NUM_BLOCKS) if block not in used]
        return left[:count] if len(left) >= count else None

    @rule(lease_s=st.sampled_from([0.0, 3.0]), order=st.permutations(range(P_BLOCKS)))
    def offer_for_later(self, lease_s, order):
        self.offer(lease_s, order)

    def offer(self, lease_s, order):
        mine = [ids for engine, ids, _ in self.offers.values() if engine is self.prefill]
        ids = self.free(mine, P_BLOCKS)
        if ids is None:
            return
        ids = [ids[i] for i in order]
        self.next += 1
        name = f"X{self.next}"
        tables = (BlockTable(0, tuple(ids)),)
        self.prefill.fill(tables)
        self.offers[name] = (self.prefill, ids, set(range(len(self.prefill.ranks))))
        self.references.append(self.prefill.offer(name, tables, TOKENS, lease_s=lease_s))

    @rule(which=st.integers(0, 9), hold=st.lists(st.booleans(), min_size=3, max_size=3))
    def read_again(self, which, hold):
        self.read(which, hold)

    def read(self, which, hold):
        ids = self.free([ids for ids, _ in self.reads.values()], D_BLOCKS)
        if not self.references or ids is None:
            return
        remote = self.references[-1 - which % len(self.references)]
        self.next += 1
        name = f"L{self.next}"
        for rank, held in zip(self.decode.ranks, hold, strict=True):
            rank.hold = held
        self.reads[name] = (ids, set(range(3)))
        for memory in self.decode.memories:
            fill_blocks(memory, ids, 0)
        self.decode.read(name, remote, (BlockTable(0, tuple(ids)),))

    @rule(
        hold=st.sampled_from([[False] * 3, [True] * 3, [False, True, True]]), seconds=st.sampled_from([0.0, 0.0, 6.0])
    )
    def request(self, hold, seconds):
        """Offer and read at once: the usual way, which most of the other rules disturb."""
        before = self.next
        self.offer(lease_s=0.0, order=range(P_BLOCKS))
        if self.next > before:
            self.read(which=0, hold=hold)
            self.town.run(seconds, step_s=1.0)

    @rule(seconds=st.sampled_from([21.0, 31.0]))
    def be_cut_off(self, seconds):
        """Nothing but bytes gets through for longer than a lease, and the bytes come last."""
        self.lossy = dict.fromkeys(MESSAGES, 0)
        self.town.run(seconds, step_s=1.0)
        self.collect()
        for rank in self.decode.ranks:
            for handle in rank.transport.pending():
                rank.transport.complete(handle)
        self.lossy = {}

    @rule(which=st.integers(0, 9))
    def release(self, which):
        if self.references:
            remote = self.references[-1 - which % len(self.references)]
            self.decode.each(lambda consumer, now: consumer.release(remote, now))

    @rule(which=st.integers(0, 9))
    def renew(self, which):
        if self.references:
            remote = self.references[-1 - which % len(self.references)]
            self.decode.each(lambda consumer, now: consumer.renew([remote], now))

    @rule(which=st.integers(0, 9), ranks=st.sets(st.integers(0, 2), min_size=1))
    def cancel(self, which, ranks):
        if self.reads:
            name = sorted(self.reads)[which % len(self.reads)]
            for index in sorted(ranks):
                self.decode.ranks[index].consumer.cancel(name, self.town.clock())

    @rule(which=st.integers(0, 9))
    def withdraw(self, which):
        if self.offers:
            name = sorted(self.offers)[which % len(self.offers)]
            for rank in self.offers[name][0].ranks:
                rank.producer.withdraw(name)

    @rule(rank=st.integers(0, 2), which=st.integers(0, 9), state=st.sampled_from([State.DONE, State.FAILED]),
          part=st.integers(0, 2))  # fmt: skip
    def complete(self, rank, which, state, part):
        transport = self.decode.ranks[rank].transport
        pending = sorted(transport.pending(), key=lambda handle: int(handle.batch.local_address[0]))
        if pending:
            copied = None if state is State.DONE else min(part, len(pending[which % len(pending)].batch))
            transport.complete(pending[which % len(pending)], state, num_copied=copied)

    @rule(kind=st.sampled_from(MESSAGES), copies=st.sampled_from([0, 0, 2]))
    def be_lossy(self, kind, copies):
        self.lossy[kind] = copies

    @rule()
    def be_reliable(self):
        self.lossy.clear()

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 6.0, 21.0]))
    def pass_time(self, seconds):
        self.town.run(seconds, step_s=1.0)

    @rule(rank=st.integers(0, 1))
    def lose_a_line(self, rank):
        at = self.prefill.ranks[rank].address
        self.decode.each(lambda consumer, now: consumer.line_changed(at, now, is_up=False))

    @rule()
    def restart_the_producer(self):
        if self.restarts == 2:
            return
        self.restarts += 1
        self.town.kill(self.prefill)
        for name in [n for n, (engine, _, _) in self.offers.items() if engine is self.prefill]:
            del self.offers[name]
        self.prefill = self.town.build(f"P{self.restarts}", P_SHAPE, 5000)

    @invariant()
    def nothing_is_wrong(self):
        self.collect()
        busy = {block for ids, _ in self.reads.values() for block in ids}
        for memory in self.decode.memories:
            assert holds_only(memory, [b for b in range(NUM_BLOCKS) if b not in busy], FREE), "a late write"

    def collect(self):
        for index, rank in enumerate(self.decode.ranks):
            rank.collect()
            for name, (ids, ranks) in list(self.reads.items()):
                if index not in ranks:
                    assert holds_only(rank.memory, ids, FREE), f"a write into {name} after its report"
                elif name in rank.results["received"]:
                    assert holds_the_cache(rank.memory, (BlockTable(0, tuple(ids)),)), f"{name} is wrong on {index}"
                    self.report(rank, name, index)
                elif name in rank.results["failed"]:
                    self.report(rank, name, index)
        for name, (engine, ids, ranks) in list(self.offers.items()):
            for index in sorted(ranks):
                rank = engine.ranks[index]
                rank.collect()
                if name in rank.results["sent"]:
                    fill_blocks(rank.memory, ids, REUSED)
                    ranks.discard(index)
            if not ranks:
                del self.offers[name]

    def report(self, rank, name, index):
        ids, ranks = self.reads[name]
        fill_blocks(rank.memory, ids, FREE)
        ranks.discard(index)
        if not ranks:
            del self.reads[name]

    def teardown(self):
        if not hasattr(self, "town"):
            return
        self.lossy.clear()
        for rank in self.decode.ranks:
            rank.hold = False
        for _ in range(8):
            for rank in self.decode.ranks:
                for handle in rank.transport.pending():
                    rank.transport.complete(handle)
            self.town.run(self.town.config.transfer_timeout_s / 4, step_s=1.0)
            self.collect()
        self.town.run(self.town.config.hold_s + self.town.config.lease_s, step_s=2.0)
        self.collect()
        assert not self.reads, f"never reported: {self.reads}"
        assert not self.offers, f"never freed: {self.offers}"
        for rank in [*self.decode.ranks, *self.prefill.ranks]:
            assert len(rank.producer.offers) == rank.producer.num_parked == 0
            assert rank.consumer.gauges()["live_reads"] == 0
            assert rank.transport.num_pending == 0
            assert not rank.consumer._carrier.is_due
            assert len(rank.consumer._deadlines) == 0
            if rank in self.decode.ranks:
                assert rank.consumer.is_quiet


TestFaults = Faults.TestCase
TestFaults.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


class VerifiedFaults(Faults):
    """The same with every read verified: faults end reads, and never make right bytes look wrong."""

    verify_rate = 1.0

    def teardown(self):
        super().teardown()
        if hasattr(self, "town"):
            assert self.decode.count("digest_mismatches") == self.decode.count("loop_errors") == 0


TestVerifiedFaults = VerifiedFaults.TestCase
TestVerifiedFaults.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
