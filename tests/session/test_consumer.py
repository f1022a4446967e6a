"""The consumer's promises, on a town without threads: success only when proven, failure only when drained."""

import pytest

from kvplan.planner import BlockTable
from kvplan.session.lifecycle import PeerState
from kvplan.testing.strategies import Shape
from kvplan.transport.base import State
from kvplan.wire.messages import (
    Claim,
    Done,
    DoneAck,
    Granted,
    Hello,
    HelloRequest,
    Introduce,
    Refused,
    Release,
    Renew,
    Renewed,
)
from tests.session.engines import D_SHAPE, P_SHAPE
from tests.session.town import Town

TOKENS = 12
"""Whole blocks on both sides."""


@pytest.fixture
def town():
    return Town()


def kinds(town, kind):
    return [message for _, message in town.sent_messages if isinstance(message, kind)]


def lose(*classes, times=1_000_000):
    left = {"n": times}

    def faults(sender, to, message):
        if isinstance(message, classes) and left["n"] > 0:
            left["n"] -= 1
            return 0
        return None

    return faults


def begin(town, prefill, decode, name="X", *, lease_s=0.0, hold=False):
    source, destination = prefill.table(TOKENS), decode.table(TOKENS, first_block=4)
    prefill.fill(source)
    for rank in decode.ranks:
        rank.hold = hold
    remote = prefill.offer(name, source, TOKENS, lease_s=lease_s)
    decode.read(f"local-{name}", remote, destination)
    return remote, source, destination


def complete_all(decode, state=State.DONE, **options):
    for rank in decode.ranks:
        for handle in rank.transport.pending():
            rank.transport.complete(handle, state, **options)


def test_a_read_is_received_once_and_its_offer_freed_once(town):
    prefill, decode = town.pair()
    _, _, destination = begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["received"] * 3
    assert prefill.sent("X") == [1, 1]
    decode.check(destination, TOKENS)


def test_t37_one_handshake_per_peer_however_many_requests_ask(town):
    prefill, decode = town.pair()
    source = prefill.table(TOKENS)
    prefill.fill(source)
    for i in range(20):
        remote = prefill.offer(f"X{i}", source, TOKENS)
        decode.read(f"local-{i}", remote, decode.table(TOKENS, first_block=4))
    town.settle()
    asked = [to for to, message in town.sent_messages if isinstance(message, HelloRequest) and message.engine_id == "D"]
    asked = [to for to in asked if to == prefill.desk]
    assert len(asked) == len(decode.ranks)
    assert decode.count("handshakes") == len(decode.ranks)
    introduced = kinds(town, Introduce)
    assert len(introduced) == len({(m.producer, id(m)) for m in introduced}) <= 2 * len(decode.ranks)
    assert all(decode.outcome(f"local-{i}") == ["received"] * 3 for i in range(20))


def test_claims_are_sent_before_the_reads_are_posted(town):
    prefill, decode = town.pair()
    order = []
    town.faults = lambda sender, to, message: order.append(type(message).__name__)
    begin(town, prefill, decode)
    town.settle()
    order.clear()
    for rank in decode.ranks:
        rank.on_post = lambda batch: order.append("post")
    begin(town, prefill, decode, "Y")
    assert order.index("Claim") < order.index("post") if "post" in order else "Claim" in order
    town.settle()


def test_bytes_without_a_grant_are_no_success(town):
    prefill, decode = town.pair()
    town.faults = lose(Granted)
    begin(town, prefill, decode)
    town.run(5.0)
    assert decode.outcome("local-X") == [None] * 3
    town.run(town.config.claim_timeout_s)
    assert decode.outcome("local-X") == ["claim_unanswered"] * 3


@pytest.mark.parametrize("bytes_first", [True, False], ids=["bytes first", "refusal first"])
def test_a_refusal_never_loses_the_race_against_the_bytes(town, bytes_first):
    prefill, decode = town.pair()
    begin(town, prefill, decode, "warm")
    town.settle()
    source = prefill.table(TOKENS)
    remote = prefill.reference("never offered", source, TOKENS)
    for rank in decode.ranks:
        rank.hold = not bytes_first
    decode.read("local", remote, decode.table(TOKENS, first_block=4))
    town.settle()
    assert decode.outcome("local") == [None] * 3
    town.run(town.config.claim_park_s + 1)
    if not bytes_first:
        assert decode.outcome("local") == ["unknown"] * 3 or decode.count("quarantined_reads") == 0
        complete_all(decode)
        town.settle()
    assert decode.outcome("local") == ["unknown"] * 3


def test_f4_f5_bytes_that_arrive_after_the_lease_are_not_believed(town):
    """The offer expires while the read hangs; the blocks are reused; the late bytes must not end as success."""
    prefill, decode = town.pair()
    begin(town, prefill, decode, hold=True)
    town.settle()
    town.faults = lose(Renew, Renewed)
    town.run(town.config.lease_s + 1)
    assert prefill.sent("X") == [1, 1]
    prefill.scribble(prefill.table(TOKENS))
    complete_all(decode)
    town.settle()
    assert decode.outcome("local-X") == [None] * 3
    town.faults = None
    town.run(6.0)
    assert decode.outcome("local-X") == ["lease_lost"] * 3


def test_bytes_that_arrive_after_the_proven_lease_are_believed_when_the_producer_still_keeps_the_blocks(town):
    """All renewals' answers are lost for a while, but the renewals themselves kept the lease alive."""
    prefill, decode = town.pair()
    _, _, destination = begin(town, prefill, decode, hold=True)
    town.settle()
    town.faults = lose(Renewed)
    town.run(town.config.lease_s + 5)
    complete_all(decode)
    town.settle()
    assert decode.outcome("local-X") == [None] * 3
    town.faults = None
    town.run(6.0)
    assert decode.outcome("local-X") == ["received"] * 3
    decode.check(destination, TOKENS)


def test_t34_two_missed_beats_do_not_end_a_live_read(town):
    prefill, decode = town.pair()
    begin(town, prefill, decode, hold=True)
    town.run(28.0)
    for _ in range(4):
        town.faults = lose(Renew)
        town.run(2 * town.config.heartbeat_s)
        town.faults = None
        town.run(town.config.heartbeat_s)
        assert prefill.sent("X") == [0, 0]
        if decode.outcome("local-X")[0] is not None:
            break
    assert decode.count("expiries") == 0


def test_t34_one_renewal_message_per_peer_rank_however_many_requests(town):
    prefill, decode = town.pair(Shape(1, 4, 4, "HND", "split"), Shape(1, 4, 4, "HND", "split"))
    for i in range(10):
        begin(town, prefill, decode, f"X{i}", hold=True)
    town.settle()
    before = len(kinds(town, Renew))
    town.run(town.config.heartbeat_s + 0.5)
    new = kinds(town, Renew)[before:]
    assert [len(message.items) for message in new] == [10]


def test_f10_a_lost_done_is_repeated_until_it_is_answered(town):
    prefill, decode = town.pair()
    town.faults = lose(Done, times=5)
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["received"] * 3
    assert prefill.sent("X") != [1, 1]
    town.run(4.0)
    assert prefill.sent("X") == [1, 1]
    assert prefill.count("expiries") == 0


def test_f10_a_lost_acknowledgement_costs_only_a_repetition(town):
    prefill, decode = town.pair()
    town.faults = lose(DoneAck, times=5)
    begin(town, prefill, decode)
    town.run(4.0)
    assert prefill.sent("X") == [1, 1]
    assert prefill.count("done_duplicates") >= 1


def test_f10_every_message_twice_changes_nothing(town):
    prefill, decode = town.pair()
    town.faults = lambda sender, to, message: 2
    _, _, destination = begin(town, prefill, decode)
    town.run(2.0)
    assert decode.outcome("local-X") == ["received"] * 3
    assert prefill.sent("X") == [1, 1]
    decode.check(destination, TOKENS)


@pytest.mark.parametrize(
    "kind", [Hello, HelloRequest, Introduce, Claim, Granted, Done, Release], ids=lambda k: k.__name__
)
def test_a_lost_message_of_any_kind_is_made_good(town, kind):
    prefill, decode = town.pair(Shape(8, 4, 4, "HND", "split"), Shape(2, 6, 6, "HND", "split"))
    town.faults = lose(kind, times=3)
    _, _, destination = begin(town, prefill, decode)
    town.run(12.0)
    assert decode.outcome("local-X") == ["received"] * 2
    assert prefill.sent("X") == [1] * 8
    decode.check(destination, TOKENS)


def test_producer_ranks_that_nobody_reads_are_released_at_once(town):
    prefill, decode = town.pair(Shape(8, 4, 4, "HND", "split"), Shape(2, 6, 6, "HND", "split"))
    begin(town, prefill, decode, hold=True)
    town.settle()
    assert sum(prefill.sent("X")) == 4
    complete_all(decode)
    town.settle()
    assert prefill.sent("X") == [1] * 8


def test_t22_full_local_hit_is_one_release_per_producer_rank(town):
    prefill, decode = town.pair(P_SHAPE, Shape(3, 6, 6, "HND", "split"))
    remote = prefill.offer("X", prefill.table(TOKENS), TOKENS)
    for _ in range(3):
        decode.each(lambda consumer, now: consumer.release(remote, now))
    town.settle()
    assert prefill.sent("X") == [1, 1]
    assert sum(len(m.items) for m in kinds(town, Release)) == len(prefill.ranks)
    assert decode.count("reads") == 0
    assert len(kinds(town, Claim)) == 0


def test_references_that_wait_are_kept_alive_and_then_read(town):
    prefill, decode = town.pair()
    source = prefill.table(TOKENS)
    prefill.fill(source)
    remote = prefill.offer("X", source, TOKENS)
    for _ in range(10):
        decode.each(lambda consumer, now: consumer.renew([remote], now))
        town.run(10.0)
    assert prefill.sent("X") == [0, 0]
    decode.read("local-X", remote, decode.table(TOKENS, first_block=4))
    town.settle()
    assert decode.outcome("local-X") == ["received"] * 3


def test_references_that_nobody_mentions_any_more_are_let_go(town):
    prefill, decode = town.pair()
    remote = prefill.offer("X", prefill.table(TOKENS), TOKENS)
    decode.each(lambda consumer, now: consumer.renew([remote], now))
    town.run(town.config.hold_s)
    assert prefill.sent("X") == [0, 0]
    town.run(town.config.extension_s + town.config.heartbeat_s + 1)
    assert prefill.sent("X") == [1, 1]


def test_f2_block_ids_out_of_range_fail_the_read_and_free_the_offer(town):
    prefill, decode = town.pair()
    tables = (BlockTable(0, (1, 2, 999)),)
    remote = prefill.offer("X", tables, TOKENS)
    decode.read("local-X", remote, decode.table(TOKENS))
    town.settle()
    assert decode.outcome("local-X") == ["bind_failed"] * 3
    assert "999" in decode.ranks[0].results["failed"]["local-X"].detail
    assert prefill.sent("X") == [1, 1]
    assert decode.is_clean()


@pytest.mark.parametrize("num_tokens", [0, -5, 1 << 40])
def test_f2_a_senseless_number_of_tokens_fails_the_read(town, num_tokens):
    prefill, decode = town.pair()
    remote = prefill.offer("X", prefill.table(TOKENS), num_tokens)
    decode.read("local-X", remote, decode.table(TOKENS))
    town.settle()
    assert decode.outcome("local-X") == ["bind_failed"] * 3


def test_f3_two_reads_of_one_reference_end_as_one_success(town):
    prefill, decode = town.pair()
    source = prefill.table(TOKENS)
    prefill.fill(source)
    remote = prefill.offer("X", source, TOKENS)
    decode.read("first", remote, decode.table(TOKENS, first_block=4))
    decode.read("second", remote, decode.table(TOKENS, first_block=8))
    town.settle()
    assert decode.outcome("first") == ["received"] * 3
    assert set(decode.outcome("second")) <= {"claimed_by_another", "released"}
    assert prefill.sent("X") == [1, 1]


def test_t38_of_four_siblings_with_one_reference_one_reads_and_all_four_are_reported(town):
    prefill, decode = town.pair()
    source = prefill.table(TOKENS)
    prefill.fill(source)
    remote = prefill.offer("X", source, TOKENS)
    names = [f"sibling-{i}" for i in range(4)]
    for i, name in enumerate(names):
        decode.read(name, remote, decode.table(TOKENS, first_block=2 * i))
    town.settle()
    assert decode.outcome(names[0]) == ["received"] * 3
    for name in names[1:]:
        assert set(decode.outcome(name)) <= {"claimed_by_another", "released"}
    assert prefill.sent("X") == [1, 1]


def test_t38_a_request_that_is_rejected_before_it_is_read_releases_its_offer_once(town):
    prefill, decode = town.pair()
    remote = prefill.offer("X", prefill.table(TOKENS), TOKENS)
    decode.each(lambda consumer, now: consumer.renew([remote], now))
    town.run(2.0)
    for _ in range(2):
        decode.each(lambda consumer, now: consumer.release(remote, now))
        town.run(2.0)
    assert prefill.sent("X") == [1, 1]
    assert not kinds(town, Claim)


def test_t43_messages_name_the_producers_id_and_generation_never_the_consumers(town):
    prefill, decode = town.pair(Shape(8, 4, 4, "HND", "split"), Shape(2, 6, 6, "HND", "split"))
    source = prefill.table(TOKENS)
    remote = prefill.offer("X-1", source, TOKENS, generation="g7")
    decode.read("X-2", remote, decode.table(TOKENS, first_block=4))
    town.settle()
    said = [*kinds(town, Claim), *kinds(town, Done), *kinds(town, Release), *kinds(town, Renew)]
    assert {(item.request_id, item.generation) for message in said for item in message.items} == {("X-1", "g7")}
    assert prefill.sent("X-1") == [1] * 8


def test_t43_one_id_in_two_engines_is_two_requests(town):
    first, decode = town.pair()
    second = town.build("P2", P_SHAPE, 5200)
    for i, prefill in enumerate((first, second)):
        source = prefill.table(TOKENS, first_block=1 + i)
        prefill.fill(source)
        remote = prefill.offer("X", source, TOKENS)
        decode.read(f"local-{i}", remote, decode.table(TOKENS, first_block=1 + 2 * i))
    town.settle()
    assert decode.outcome("local-0") == decode.outcome("local-1") == ["received"] * 3
    assert first.sent("X") == second.sent("X") == [1, 1]


def test_t43_a_second_read_with_a_live_id_is_ignored(town):
    prefill, decode = town.pair()
    remote, _, _ = begin(town, prefill, decode)
    decode.read("local-X", remote, decode.table(TOKENS, first_block=8))
    town.settle()
    assert decode.outcome("local-X") == ["received"] * 3
    assert decode.count("duplicates_ignored") == 3


def test_t35_a_cancelled_read_is_reported_when_its_last_write_has_ended(town):
    prefill, decode = town.pair(D_SHAPE, D_SHAPE)
    begin(town, prefill, decode, hold=True)
    town.settle()
    decode.each(lambda consumer, now: consumer.cancel("local-X", now))
    town.run(10.0)
    assert decode.outcome("local-X") == [None] * 3
    assert decode.ranks[0].consumer.gauges()["quarantined_reads"] == 1
    assert prefill.sent("X") == [0] * 3
    complete_all(decode)
    town.settle()
    assert decode.outcome("local-X") == ["aborted"] * 3
    assert prefill.sent("X") == [1] * 3


def test_t39_two_ranks_abort_one_transfer_and_both_answer_after_the_drain(town):
    prefill, decode = town.pair(D_SHAPE, Shape(2, 6, 6, "NHD", "packed"))
    begin(town, prefill, decode, hold=True)
    town.settle()
    decode.each(lambda consumer, now: consumer.cancel("local-X", now))
    first, second = decode.ranks
    for handle in first.transport.pending():
        first.transport.complete(handle)
    town.settle()
    assert decode.outcome("local-X") == ["aborted", None]
    for handle in second.transport.pending():
        second.transport.complete(handle)
    town.settle()
    assert decode.outcome("local-X") == ["aborted", "aborted"]
    assert prefill.sent("X") == [1] * 3


def test_t39_an_abort_of_an_unknown_id_is_counted_and_nothing_waits(town):
    _, decode = town.pair()
    decode.each(lambda consumer, now: consumer.cancel("nobody", now))
    assert decode.count("aborts_unknown") == 3


def test_f9_a_read_that_is_cancelled_before_first_contact_releases_the_offer(town):
    prefill, decode = town.pair()
    prefill.ready = False
    begin(town, prefill, decode)
    town.settle()
    decode.each(lambda consumer, now: consumer.cancel("local-X", now))
    assert decode.outcome("local-X") == ["aborted"] * 3
    prefill.ready = True
    town.run(3.0)
    assert prefill.sent("X") == [1, 1]
    assert decode.is_clean()


def test_staged_bytes_may_be_late_because_they_do_not_touch_the_blocks():
    """A read through the staging area is reported at once when cancelled; its slot waits for the late write."""
    town = Town(staging_bytes=1 << 16)
    prefill, decode = town.pair(Shape(1, 4, 2, "HND", "split"), Shape(1, 6, 6, "NHD", "split"))
    begin(town, prefill, decode, hold=True)
    town.settle()
    consumer = decode.ranks[0].consumer
    assert [piece.scatter is not None for piece in consumer._carrier._flying] == [True]
    consumer.cancel("local-X", town.clock())
    assert decode.outcome("local-X") == ["aborted"]
    complete_all(decode)
    town.settle()
    assert decode.is_clean()
    assert consumer._carrier.staging.has_free


def test_t35_a_staging_slot_with_a_writer_is_not_given_to_another_read():
    town = Town(staging_bytes=1 << 16, staging_slots=1)
    prefill, decode = town.pair(Shape(1, 4, 2, "HND", "split"), Shape(1, 6, 6, "NHD", "split"))
    begin(town, prefill, decode, "X", hold=True)
    town.settle()
    decode.ranks[0].consumer.cancel("local-X", town.clock())
    _, _, destination = begin(town, prefill, decode, "Y")
    town.run(3.0)
    assert decode.outcome("local-Y") == [None]
    complete_all(decode)
    town.settle()
    assert decode.outcome("local-Y") == ["received"]
    decode.check(destination, TOKENS)


@pytest.mark.parametrize("fault", [State.FAILED, "raise", "poll"], ids=["at post", "raised at post", "at poll"])
def test_f13_one_transport_error_is_read_again_and_made_good(town, fault):
    prefill, decode = town.pair()
    left = {"n": 1}

    def on_post(batch):
        if left["n"]:
            left["n"] -= 1
            if fault == "raise":
                raise OSError("cable pulled")
            return State.PENDING if fault == "poll" else fault
        return None

    decode.ranks[1].on_post = on_post
    _, _, destination = begin(town, prefill, decode)
    town.settle()
    if fault == "poll":
        complete_all(decode, State.FAILED, num_copied=1)
        town.settle()
    assert decode.outcome("local-X") == ["received"] * 3
    assert decode.count("pieces_retried") == 1
    decode.check(destination, TOKENS)


def test_f13_errors_beyond_the_budget_fail_the_read_and_free_the_offer(town):
    prefill, decode = town.pair()
    decode.ranks[1].on_post = lambda batch: State.FAILED
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["received", "transport_error", "received"]
    assert prefill.sent("X") == [1, 1]


def test_partial_failure_reads_again_only_what_is_missing():
    town = Town(max_post_bytes=256)
    prefill, decode = town.pair(Shape(1, 4, 4, "HND", "split"), Shape(1, 4, 4, "HND", "split"))
    posts = []

    def on_post(batch):
        posts.append((int(batch.local_address[0]), batch.total_bytes))
        return State.FAILED if len(posts) == 2 else None

    decode.ranks[0].on_post = on_post
    _, _, destination = begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["received"]
    assert len(posts) == len(set(posts)) + 1 > 3
    assert posts.count(posts[1]) == 2
    decode.check(destination, TOKENS)


def test_f6_a_producer_that_dies_with_bytes_on_their_way_fails_the_read_when_they_have_ended(town):
    prefill, decode = town.pair(D_SHAPE, D_SHAPE)
    begin(town, prefill, decode, hold=True)
    town.settle()
    town.kill(prefill)
    town.run(town.config.hello_timeout_s + 1)
    assert decode.outcome("local-X") == [None] * 3
    complete_all(decode, State.FAILED)
    town.settle()
    assert set(decode.outcome("local-X")) <= {"peer_gone", "transport_error"}
    town.run(1.0)
    assert decode.ranks[0].consumer.gauges()["live_peers"] == 0


def test_f7_t37_a_successor_on_the_same_address_is_a_new_peer(town):
    prefill, decode = town.pair()
    old, _, _ = begin(town, prefill, decode)
    town.settle()
    town.kill(prefill)
    successor = town.build("P-again", P_SHAPE, 5000)
    decode.read("stale", old, decode.table(TOKENS, first_block=8))
    source = successor.table(TOKENS)
    successor.fill(source)
    remote = successor.offer("X", source, TOKENS)
    decode.read("fresh", remote, decode.table(TOKENS, first_block=4))
    town.run(3.0)
    assert decode.outcome("fresh") == ["received"] * 3
    assert set(decode.outcome("stale")) <= {"engine_restarted", "peer_gone"}
    decode.read("stale again", old, decode.table(TOKENS, first_block=8))
    town.run(1.0)
    assert decode.outcome("stale again") == ["engine_restarted"] * 3
    assert "P-again" in decode.ranks[0].results["failed"]["stale again"].detail
    town.run(1.0)
    assert list(decode.ranks[0].consumer._book.peers) == ["P-again"]


def test_t37_the_old_engines_state_is_kept_until_its_last_transfer_ends(town):
    prefill, decode = town.pair(D_SHAPE, D_SHAPE)
    begin(town, prefill, decode, hold=True)
    town.settle()
    peers = decode.ranks[0].consumer._book.peers
    town.kill(prefill)
    town.build("P-again", D_SHAPE, 5000)
    town.run(2.0)
    assert peers["P"].state is PeerState.GONE
    assert decode.ranks[0].transport.peers == ("P/0",)
    complete_all(decode, State.FAILED)
    town.settle()
    assert "P" not in peers
    assert decode.ranks[0].transport.peers == ()


def test_a_lost_connection_to_a_live_engine_costs_nothing(town):
    prefill, decode = town.pair(D_SHAPE, D_SHAPE)
    _, _, destination = begin(town, prefill, decode, hold=True)
    town.settle()
    for rank in prefill.ranks:
        decode.each(lambda consumer, now, at=rank.address: consumer.line_changed(at, now, is_up=False))
    town.run(1.0)
    complete_all(decode)
    town.settle()
    assert decode.outcome("local-X") == ["received"] * 3
    decode.check(destination, TOKENS)
    assert prefill.sent("X") == [1] * 3


def test_t37_nobody_there_fails_in_time_and_the_next_request_tries_again(town):
    prefill, decode = town.pair()
    town.kill(prefill)
    source = prefill.table(TOKENS)
    decode.read("first", prefill.reference("X", source, TOKENS), decode.table(TOKENS))
    town.run(town.config.handshake_timeout_s - 1)
    assert decode.outcome("first") == [None] * 3
    town.run(1.5)
    assert decode.outcome("first") == ["handshake_timeout"] * 3
    assert "nobody listens" in decode.ranks[0].results["failed"]["first"].detail
    town.run(town.config.heartbeat_s)
    assert decode.ranks[0].consumer.gauges()["live_peers"] == 0
    assert decode.ranks[0].consumer._book.desks.next_due() == float("inf")
    reborn = town.build("P", P_SHAPE, 5000)
    reborn.fill(source)
    decode.read("second", reborn.offer("X", source, TOKENS), decode.table(TOKENS, first_block=4))
    town.run(1.0)
    assert decode.outcome("second") == ["received"] * 3


def test_t48_a_mismatch_fails_at_once_with_field_and_both_values(town):
    prefill = town.build("P", P_SHAPE, 5000, compatibility={"model": "tiny", "dtype": "float32"})
    decode = town.build("D", D_SHAPE, 5100)
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["incompatible"] * 3
    detail = decode.ranks[0].results["failed"]["local-X"].detail
    assert "dtype: ours bfloat16, theirs float32" in detail
    decode.read("again", prefill.reference("Y", prefill.table(TOKENS), TOKENS), decode.table(TOKENS))
    town.settle()
    assert decode.outcome("again") == ["incompatible"] * 3
    assert decode.count("handshakes_refused") == 3


def test_a_plan_that_does_not_exist_is_refused_at_the_handshake(town):
    prefill = town.build("P", P_SHAPE, 5000, num_layers=1)
    decode = town.build("D", D_SHAPE, 5100, num_layers=2)
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["incompatible"] * 3
    assert "layer.1" in decode.ranks[0].results["failed"]["local-X"].detail


def test_an_incompatible_engine_can_still_be_told_to_release(town):
    prefill = town.build("P", P_SHAPE, 5000, compatibility={"model": "other"})
    decode = town.build("D", D_SHAPE, 5100)
    remote, _, _ = begin(town, prefill, decode)
    town.settle()
    decode.each(lambda consumer, now: consumer.release(remote, now))
    town.settle()
    assert prefill.sent("X") == [1, 1]


def test_f16_a_hello_with_an_unsound_layout_is_refused(town):
    import msgspec

    prefill, decode = town.pair()
    rank = prefill.hello.layout.ranks[0]
    regions = (msgspec.structs.replace(rank.regions[0], num_blocks=1 << 60), *rank.regions[1:])
    broken = msgspec.structs.replace(prefill.hello.layout, ranks=(msgspec.structs.replace(rank, regions=regions),))
    prefill.hello = msgspec.structs.replace(prefill.hello, layout=broken)
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["handshake_failed"] * 3
    assert decode.is_clean()


def test_f16_a_hello_whose_regions_are_larger_than_what_is_registered_fails_the_read(town):
    """The layout is sound by itself, but the transport knows that the memory is not there."""
    import msgspec

    prefill, decode = town.pair()
    ranks = tuple(
        msgspec.structs.replace(
            rank, regions=tuple(msgspec.structs.replace(r, base=r.base + (1 << 30)) for r in rank.regions)
        )
        for rank in prefill.hello.layout.ranks
    )
    prefill.hello = msgspec.structs.replace(
        prefill.hello, layout=msgspec.structs.replace(prefill.hello.layout, ranks=ranks)
    )
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["transport_error"] * 3
    assert decode.is_clean()


@pytest.mark.parametrize("address", ["0.0.0.0:80", "10.0.0.9:80"], ids=["wildcard", "not allowed"])
def test_t44_t46b_control_addresses_are_checked(address):
    import msgspec

    town = Town(allowed_peers=("127.0.0.1",))
    prefill, decode = town.pair()
    cards = tuple(msgspec.structs.replace(card, control_address=address) for card in prefill.hello.ranks)
    prefill.hello = msgspec.structs.replace(prefill.hello, ranks=cards)
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["handshake_failed"] * 3


def test_t46b_no_connection_to_a_peer_that_is_not_allowed():
    town = Town(allowed_peers=("10.0.0.0/8",))
    prefill, decode = town.pair()
    begin(town, prefill, decode)
    town.run(1.0)
    assert decode.outcome("local-X") == ["peer_not_allowed"] * 3
    assert {to for to, message in town.sent_messages if message.engine_id == "D"} == {decode.desk}


def test_f14_reads_beyond_the_limit_are_refused_at_once():
    town = Town(max_reads=2)
    prefill, decode = town.pair()
    for name in "ABC":
        begin(town, prefill, decode, name)
    assert decode.outcome("local-C") == ["overloaded"] * 3
    town.settle()
    assert decode.outcome("local-A") == decode.outcome("local-B") == ["received"] * 3


def test_t37_idle_peers_are_forgotten_but_never_with_a_transfer_running(town):
    prefill, decode = town.pair(D_SHAPE, D_SHAPE)
    begin(town, prefill, decode, "A")
    town.settle()
    begin(town, prefill, decode, "B", hold=True)
    town.run(town.config.peer_idle_s + 60, step_s=5.0)
    assert decode.ranks[0].consumer.gauges()["live_peers"] == 1
    complete_all(decode)
    town.run(town.config.heartbeat_s + 1)
    assert decode.ranks[0].consumer.gauges()["live_peers"] == 0
    assert decode.ranks[0].transport.peers == ()


def test_t37_idle_peers_are_not_forgotten_before_they_have_heard_that_a_read_is_over():
    town = Town(peer_idle_s=0.0)
    prefill, decode = town.pair()
    town.faults = lose(Done, times=28)
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["received"] * 3
    town.run(2 * town.config.heartbeat_s)
    assert prefill.sent("X") == [1, 1]
    assert prefill.count("expiries") == 0
    town.run(town.config.heartbeat_s + 1.0)
    assert decode.ranks[0].consumer.gauges()["live_peers"] == 0


def test_f15_closing_fails_what_waits_and_drains_what_flies(town):
    prefill, decode = town.pair(D_SHAPE, D_SHAPE)
    remote, _, _ = begin(town, prefill, decode, hold=True)
    town.settle()
    decode.each(lambda consumer, now: consumer.close(now))
    decode.read("late", remote, decode.table(TOKENS))
    assert decode.outcome("late") == ["closing"] * 3
    assert decode.outcome("local-X") == [None] * 3
    assert not decode.ranks[0].consumer.is_quiet
    complete_all(decode)
    town.settle()
    assert decode.outcome("local-X") == ["closing"] * 3
    assert decode.ranks[0].consumer.is_quiet


def test_a_partial_prefix_hit_moves_only_what_is_missing(town):
    prefill, decode = town.pair()
    source = prefill.table(TOKENS)
    prefill.fill(source)
    remote = prefill.offer("X", source, TOKENS)
    destination = decode.table(TOKENS, first_block=4, first_token=6)
    decode.read("local-X", remote, destination)
    town.settle()
    assert decode.outcome("local-X") == ["received"] * 3
    decode.check(destination, TOKENS)


def test_a_read_of_a_rank_that_needs_nothing_still_claims_and_is_done():
    """T40: a reader with zero bytes to move notifies all the same, so the offer ends."""
    town = Town()
    prefill, decode = town.pair()
    source = prefill.table(TOKENS)
    prefill.fill(source)
    remote = prefill.offer("X", source, TOKENS)
    decode.read("local-X", remote, (BlockTable(TOKENS, ()),))
    town.settle()
    assert decode.outcome("local-X") == ["received"] * 3
    assert prefill.sent("X") == [1, 1]
    assert decode.is_clean()


def test_a_router_that_mangles_the_tables_is_found_out(town):
    prefill, decode = town.pair()
    source = prefill.table(TOKENS)
    prefill.fill(source)
    prefill.offer("X", source, TOKENS)
    mangled = (BlockTable(0, tuple(reversed(source[0].block_ids))),)
    decode.read("local-X", prefill.reference("X", mangled, TOKENS), decode.table(TOKENS, first_block=4))
    town.settle()
    assert decode.outcome("local-X") == ["tables_differ"] * 3


def test_refusals_of_a_kind_that_is_not_known_are_refusals(town):
    prefill, decode = town.pair()

    def faults(sender, to, message):
        if isinstance(message, Granted):
            items = message.items
            from kvplan.wire.messages import RefusalItem

            refusal = Refused(
                reader=message.reader,
                items=tuple(RefusalItem(i.request_id, i.generation, "moon_phase", "", i.ticket) for i in items),
            )
            town.mail.append(
                (sender, town._routes()[str(to).encode()], __import__("kvplan.wire.codec").wire.codec.encode(refusal))
            )
            return 0
        return None

    town.faults = faults
    begin(town, prefill, decode)
    town.settle()
    assert decode.outcome("local-X") == ["refused"] * 3
