"""Verification when things go wrong: lost words, lost leases, peers that cannot, hands that are full. No threads."""

from __future__ import annotations

import dataclasses
import math
from collections import deque

import msgspec
import pytest

from kvplan.errors import DescriptionError
from kvplan.planner import BlockTable, EngineLayout
from kvplan.session import Offer, SessionConfig
from kvplan.session.verifier import is_sampled
from kvplan.wire.digests import Digest, Digested, DigestRefused, ScopeItem
from kvplan.wire.messages import Introduce, Renew
from tests.session.engines import P_SHAPE
from tests.session.test_consumer import TOKENS, begin, complete_all, kinds, lose
from tests.session.town import Town

VERIFIED = ["received"] * 3


@pytest.fixture
def town():
    return Town(verify_rate=1.0)


def waiting(town, prefill, decode):
    """Begin a read and bring its bytes, so that the next step verifies it; return the tables."""
    tables = begin(town, prefill, decode, hold=True, lease_s=5.0)[1:]
    town.settle()
    complete_all(decode)
    return tables


def spoil(engine, table, rank=0, region=0, at=3):
    """Invert a byte of a request's first block on one rank."""
    layout, held = engine.memories[rank].rank, engine.memories[rank].bytes[region]
    held[table[0].block_ids[0] * layout.regions[region].block_stride_bytes + at] ^= 0xFF


def details(engine):
    return [rank.results["failed"]["local-X"].detail for rank in engine.ranks if rank.results["failed"]]


def hold_jobs(engine):
    """Let jobs of an engine's ranks wait; return them."""
    jobs = deque()
    for rank in engine.ranks:
        rank.submit = lambda job: jobs.append(job) or True
    return jobs


def test_right_bytes_are_received_after_their_digests(town):
    prefill, decode = town.pair()
    _, destination = waiting(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == VERIFIED
    assert decode.count("reads_verified") == 3
    assert len(kinds(town, Digest)) == prefill.count("digests_answered") == 4
    assert prefill.sent("X") == [1, 1]
    decode.check(destination, TOKENS)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_it_does_not_matter_on_which_side_the_bytes_are_wrong(town, side):
    """A producer that goes on writing is caught as well as a carrier that lies."""
    prefill, decode = town.pair()
    source, destination = waiting(town, prefill, decode)
    if side == "producer":
        spoil(prefill, source, at=1)
    else:
        spoil(decode, destination)
    town.settle()
    assert decode.outcome("local-X").count("digest_mismatch") == 1
    assert "layer 'layer.0' component 'k' kv_head 0, token 0: the 8 bytes at 0x" in details(decode)[0]
    assert prefill.sent("X") == [1, 1]


def test_words_about_digests_may_be_lost_and_repeated(town):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    town.faults = lose(Digest, Digested, times=5)
    town.run(5.0)
    assert decode.outcome("local-X") == VERIFIED
    town.faults = lambda *_: 2
    waiting_tables = prefill.table(TOKENS)
    decode.read("local-Y", prefill.offer("Y", waiting_tables, TOKENS), decode.table(TOKENS, first_block=4))
    town.run(2.0)
    complete_all(decode)
    town.run(2.0)
    assert decode.outcome("local-Y") == VERIFIED


def test_a_producer_that_never_answers_fails_the_read_in_time_and_is_named(town):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    town.faults = lose(Digest)
    town.run(29.0)
    assert decode.outcome("local-X") == [None] * 3
    assert len(kinds(town, Renew)) > 10
    town.run(2.0)
    assert decode.outcome("local-X") == ["verify_failed"] * 3
    assert details(decode)[0] == "no digests of rank 0 of engine P within 30.0 s"
    assert prefill.sent("X") == [1, 1]
    assert decode.count("digest_mismatches") == 0


def test_a_wrong_byte_that_is_not_found_in_time_is_a_mismatch_all_the_same(town):
    prefill, decode = town.pair()
    _, destination = waiting(town, prefill, decode)
    spoil(decode, destination)
    town.faults = lambda sender, to, message: 0 if getattr(message, "scope", None) not in {None, ScopeItem()} else None
    town.run(31.0)
    assert decode.outcome("local-X") == ["digest_mismatch", "received", "received"]
    what = "layer 'layer.0' component 'k' from rank 0 of engine P is wrong"
    assert details(decode) == [f"{what}; where was not found within 30.0 s"]


def test_memory_that_changes_between_two_questions_is_told_as_that(town):
    prefill, decode = town.pair()
    _, destination = waiting(town, prefill, decode)
    spoil(decode, destination)
    jobs = hold_jobs(decode)
    town.settle()
    jobs.popleft()()
    spoil(decode, destination)
    while jobs:
        jobs.popleft()()
        town.run(0.25)
    assert decode.outcome("local-X") == ["digest_mismatch", "received", "received"]
    assert "the memory of one side is being written" in details(decode)[0]


def test_a_producer_that_knows_no_digests_is_named_at_once(town):
    prefill, decode = town.pair()
    prefill.hello = msgspec.structs.replace(prefill.hello, features=())
    waiting(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["verify_unsupported"] * 3
    assert details(decode)[0] == "engine P runs a kvplan that does not answer questions for digests"
    assert not kinds(town, Digest)


def test_a_producer_that_knows_no_digests_serves_those_who_do_not_ask():
    town = Town()
    prefill, decode = town.pair()
    prefill.hello = msgspec.structs.replace(prefill.hello, features=())
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == VERIFIED


def test_a_lease_that_ends_before_the_digests_are_there_makes_them_worthless(town):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    jobs = hold_jobs(prefill)
    town.settle()
    assert len(jobs) == 4
    town.faults = lose(Renew)
    town.run(25.0)
    prefill.scribble(prefill.table(TOKENS))
    while jobs:
        jobs.popleft()()
    town.faults = None
    town.run(1.0)
    assert set(decode.outcome("local-X")) == {"lease_lost"}
    assert prefill.count("digests_answered") == 0


def test_the_lease_is_renewed_for_as_long_as_verification_takes(town):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    jobs = hold_jobs(prefill)
    town.run(28.0)
    assert prefill.sent("X") == [0, 0]
    while jobs:
        jobs.popleft()()
    town.settle()
    assert decode.outcome("local-X") == VERIFIED


def test_the_same_question_is_not_worked_on_twice_at_a_time(town):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    jobs = hold_jobs(prefill)
    town.run(10.0)
    assert len(kinds(town, Digest)) > 20
    assert len(jobs) == 4


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_hands_that_are_full_are_asked_again(town, side):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    ranks = (prefill if side == "producer" else decode).ranks
    free = [rank.submit for rank in ranks]
    for rank in ranks:
        rank.submit = lambda job: False
    town.run(5.0)
    assert decode.outcome("local-X") == [None] * 3
    for rank, submit in zip(ranks, free, strict=True):
        rank.submit = submit
    town.run(2.0)
    assert decode.outcome("local-X") == VERIFIED


def test_a_producer_that_has_forgotten_us_is_introduced_to_us_again():
    town = Town(verify_rate=1.0, max_peers=1)
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    other = town.build("E", P_SHAPE, 5200)
    town.faults = lose(Digest)
    town.run(1.5)
    begin(town, prefill, other, "Z")
    town.settle()
    town.faults = None
    town.run(5.0)
    assert decode.outcome("local-X") == VERIFIED
    assert len([m for m in kinds(town, Introduce) if m.engine_id == "D"]) > 4


def test_a_read_that_is_given_up_while_it_is_verified_fails_at_once(town):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    jobs = hold_jobs(prefill)
    town.settle()
    decode.each(lambda consumer, now: consumer.cancel("local-X", now))
    assert decode.outcome("local-X") == ["aborted"] * 3
    town.settle()
    while jobs:
        jobs.popleft()()
    town.run(1.0)
    assert prefill.sent("X") == [1, 1]
    assert prefill.count("digests_answered") == 0


def test_a_peer_that_dies_while_it_is_asked_ends_the_read(town):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    hold_jobs(prefill)
    town.settle()
    town.kill(prefill)
    town.run(10.0)
    assert decode.outcome("local-X") == ["peer_gone"] * 3


def question(**changes):
    base = Digest(engine_id="D", rank=0, number=1, request_id="X", generation="g1", ticket="local-X",
                  tables=(), scope=ScopeItem())  # fmt: skip
    return msgspec.structs.replace(base, **changes)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"engine_id": "E"}, "not_introduced"),
        ({"request_id": "W"}, "not_claimed"),
        ({"generation": "g0"}, "not_claimed"),
        ({"ticket": "another"}, "not_claimed"),
        ({"rank": 7}, "not_claimed"),
        ({}, "failed"),
        ({"scope": ScopeItem("layer.9", "k")}, "failed"),
        ({"scope": ScopeItem("layer.0", "k", 99)}, "failed"),
        ({"scope": ScopeItem("layer.0", "k", None, 3, 2)}, "failed"),
    ],
)
def test_questions_of_others_and_questions_without_sense_are_refused(town, changes, reason):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    hold_jobs(decode)
    town.faults = lose(Digested)
    town.settle()
    tables = () if not changes else kinds(town, Digest)[0].tables
    asked = question(**{"tables": tables, **changes})
    (answer,) = prefill.ranks[0].producer.handle(b"route", asked, town.clock())
    assert isinstance(answer.message, DigestRefused)
    assert answer.message.reason == reason


def test_an_offer_without_block_tables_cannot_be_verified(town):
    prefill, decode = town.pair()
    source, destination = prefill.table(TOKENS), decode.table(TOKENS, first_block=4)
    for rank in prefill.ranks:
        town.answer(rank, rank.producer.offer(Offer("X", "g1", (), TOKENS), town.clock()))
    decode.read("local-X", prefill.reference("X", source, TOKENS), destination)
    town.settle()
    assert decode.outcome("local-X") == ["verify_failed"] * 3
    assert "carries no block tables" in details(decode)[0]


def test_answers_that_nobody_waits_for_are_counted_and_forgotten(town):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    town.settle()
    rank, producer = decode.ranks[0], prefill.ranks[0].address
    before = rank.stats.snapshot()["unexpected_messages"]
    for number in (1, 77):
        rank.consumer.hear(producer, Digested(engine_id="D", rank=0, number=number), town.clock())
        rank.consumer.hear(producer, DigestRefused(engine_id="D", rank=0, number=number, reason="failed"), town.clock())
    assert rank.stats.snapshot()["unexpected_messages"] == before + 4


def test_device_memory_is_not_read_and_said_to_be_unsupported(town):
    prefill, decode = town.pair()
    waiting(town, prefill, decode)
    for rank in decode.ranks:
        (peer,) = rank.consumer.view(town.clock()).peers
        assert peer.state == "ready"
    layout = EngineLayout("P", tuple(_on_device(rank) for rank in prefill.layout.ranks))
    for rank in prefill.ranks:
        rank.producer.learn_own(layout)
        answers = rank.producer.handle(b"route", _introduce_again(town, rank), town.clock())
        assert len(answers) == 1
    town.settle()
    assert decode.outcome("local-X") == ["verify_unsupported"] * 3
    assert "the cache lies on cuda:0; digests are taken of host memory only" in details(decode)[0]


def _on_device(rank):
    regions = tuple(dataclasses.replace(region, device="cuda:0") for region in rank.regions)
    return dataclasses.replace(rank, regions=regions)


def _introduce_again(town, rank):
    return next(m for to, m in town.sent_messages if isinstance(m, Introduce) and to == rank.address)


def test_a_request_whose_tokens_are_all_here_already_is_verified_too(town):
    prefill, decode = town.pair()
    source = prefill.table(TOKENS)
    remote = prefill.offer("X", source, TOKENS)
    decode.read("local-X", remote, (BlockTable(TOKENS, ()),))
    town.settle()
    assert decode.outcome("local-X") == VERIFIED


@pytest.mark.parametrize("rate", [-0.1, 1.01, 2.0, math.nan])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(DescriptionError, match="verify_rate"):
        SessionConfig(verify_rate=rate)


def test_a_rate_may_be_given_as_a_whole_number():
    assert SessionConfig.of({"verify_rate": 1}).verify_rate == 1.0


def test_sampling_is_fair_and_nested():
    names = [f"cmpl-{i}" for i in range(4000)]
    for rate in (0.0, 0.01, 0.25, 0.9, 1.0):
        chosen = {name for name in names if is_sampled(name, rate)}
        assert abs(len(chosen) - rate * len(names)) < 4 * (len(names) * 0.25) ** 0.5
        assert all(is_sampled(name, min(1.0, rate + 0.05)) for name in chosen)
