"""The producer's promises, message by message, on a clock that is moved by hand."""

import pytest

from kvplan.planner import BlockTable
from kvplan.session import Identity, Offer, SessionConfig
from kvplan.session.producer import Producer
from kvplan.session.stats import Stats
from kvplan.testing.clock import FakeClock
from kvplan.testing.strategies import Shape, engine
from kvplan.wire.fingerprint import tables_digest
from kvplan.wire.layouts import to_body
from kvplan.wire.messages import (
    Claim,
    ClaimItem,
    Done,
    DoneAck,
    DoneItem,
    Granted,
    Introduce,
    Introduced,
    IntroduceRefused,
    NotReady,
    Party,
    Reference,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
)

TABLES = (BlockTable(0, (7, 3, 9)),)
ROUTE = b"route"


def layout(name, parallel, total=4):
    shape = Shape(parallel, 4, 4, "HND", "split")
    return engine(name, shape, total, num_layers=1, num_blocks=12, base=1 << 20)


class Desk:
    """One producer rank, a clock, and its readers' messages."""

    def __init__(self, *, p_parallel=1, rank=0, total=4, **options):
        self.clock = FakeClock(1000.0)
        self.stats = Stats()
        self.total = total
        self.config = SessionConfig(**options)
        self.producer = Producer(identity=Identity("P", rank, p_parallel), config=self.config, stats=self.stats)
        self.producer.learn_own(layout("P", p_parallel, total))
        self.me = Party("P", rank)

    def say(self, message, route=ROUTE):
        return [answer.message for answer in self.producer.handle(route, message, self.clock())]

    def introduce(self, name="D", parallel=4):
        body = to_body(layout(name, parallel, self.total))
        return self.say(Introduce(producer=self.me, engine_id=name, layout=body))

    def offer(self, request_id="X", generation="g1", tables=TABLES, num_tokens=10, lease_s=0.0):
        offer = Offer(request_id, generation, tables, num_tokens, lease_s)
        return [answer.message for answer in self.producer.offer(offer, self.clock())]

    def claim(self, rank=0, request_id="X", generation="g1", ticket="t", engine="D", digest=""):
        return self.say(Claim(reader=Party(engine, rank), items=(ClaimItem(request_id, generation, ticket, digest),)))

    def done(self, rank=0, request_id="X", generation="g1", ticket="t", engine="D", ok=True):
        return self.say(Done(reader=Party(engine, rank), items=(DoneItem(request_id, generation, ticket, ok),)))

    def release(self, request_id="X", generation="g1", engine="D", rank=0):
        return self.say(Release(reader=Party(engine, rank), items=(Reference(request_id, generation),)))

    def renew(self, request_id="X", generation="g1", engine="D"):
        return self.say(Renew(reader=Party(engine, 0), number=1, items=(Reference(request_id, generation),)))

    def tick(self, seconds=0.0):
        return [answer.message for answer in self.producer.tick(self.clock.advance(seconds))]

    def sent(self):
        return set(self.producer.offers.take_sent())

    def count(self, name):
        return self.stats.snapshot()[name]


def granted(answers):
    (answer,) = answers
    assert isinstance(answer, Granted), answer
    return answer.items[0].lease_s


def refused(answers):
    (answer,) = answers
    assert isinstance(answer, Refused), answer
    return answer.items[0].reason


@pytest.fixture
def desk():
    desk = Desk()
    assert isinstance(desk.introduce()[0], Introduced)
    return desk


def test_t40_done_at_the_last_distinct_reader(desk):
    desk.offer()
    for rank in range(4):
        granted(desk.claim(rank))
    for rank in (0, 1, 0, 0, 2):
        assert isinstance(desk.done(rank)[0], DoneAck)
        assert not desk.sent()
    desk.done(3)
    assert desk.sent() == {"X"}
    assert desk.count("done_duplicates") == 2


def test_t40_a_failure_message_counts_as_done_for_the_blocks(desk):
    desk.offer()
    for rank in range(4):
        desk.claim(rank)
        desk.done(rank, ok=rank != 2)
    assert desk.sent() == {"X"}


def test_t40_done_before_registration_is_kept_and_applied(desk):
    for rank in range(4):
        desk.done(rank)
    assert not desk.sent()
    desk.offer()
    assert desk.sent() == {"X"}
    assert desk.producer.num_parked == 0


def test_t40_readers_are_counted_by_the_election_not_by_rank_count():
    desk = Desk(p_parallel=8, rank=0, total=4)
    desk.introduce(parallel=2)
    readers = desk.producer._readers("D")
    desk.offer()
    assert len(readers) == 1
    (reader,) = readers
    granted(desk.claim(reader))
    desk.done(reader)
    assert desk.sent() == {"X"}


def test_t40_one_done_lost_ends_with_the_lease_not_never(desk):
    desk.offer()
    for rank in range(4):
        desk.claim(rank)
    for rank in range(3):
        desk.done(rank)
    desk.tick(desk.config.lease_s + 0.1)
    assert desk.sent() == {"X"}
    assert desk.count("expiries") == 1


def test_f10_done_of_a_stranger_or_of_another_read_frees_nothing(desk):
    desk.introduce("E")
    desk.offer()
    for rank in range(4):
        desk.claim(rank)
        desk.done(rank, engine="E", ticket="other")
        desk.done(rank, ticket="other")
        desk.done(rank, engine="nobody")
    assert not desk.sent()
    assert desk.count("done_strangers") == 12


def test_t43_two_generations_of_one_request_id_are_two_offers(desk):
    desk.offer(generation="g1")
    desk.offer(generation="g2")
    assert refused(desk.claim(generation="g1")) == "stale_generation"
    granted(desk.claim(generation="g2"))


def test_t43_an_older_generation_that_is_read_pins_its_blocks_until_its_reader_is_done(desk):
    desk.offer(generation="g1")
    granted(desk.claim(0, generation="g1"))
    desk.offer(generation="g2")
    for rank in range(4):
        granted(desk.claim(rank, generation="g2"))
        desk.done(rank, generation="g2")
    assert not desk.sent()
    desk.done(0, generation="g1")
    assert desk.sent() == {"X"}


def test_t43_a_duplicate_offer_is_ignored(desk):
    desk.offer()
    granted(desk.claim())
    desk.offer()
    assert desk.count("duplicates_ignored") == 1
    assert len(desk.producer.offers) == 1


def test_f1_an_unknown_request_is_refused_after_a_bounded_wait(desk):
    assert desk.claim() == []
    assert desk.tick(desk.config.claim_park_s - 0.1) == []
    assert refused(desk.tick(0.2)) == "unknown"
    assert desk.count("stale_references") == 1


def test_a_claim_that_comes_before_its_offer_is_granted_when_the_offer_comes(desk):
    assert desk.claim() == []
    assert desk.claim() == []
    desk.clock.advance(1.0)
    granted(desk.offer())
    assert desk.tick(100.0) == []


def test_f3_one_reference_serves_one_read(desk):
    desk.introduce("E")
    desk.offer()
    granted(desk.claim(0, ticket="first"))
    granted(desk.claim(0, ticket="first"))
    assert refused(desk.claim(1, ticket="second")) == "claimed_by_another"
    assert refused(desk.claim(0, engine="E", ticket="first")) == "claimed_by_another"
    granted(desk.claim(1, ticket="first"))


def test_f3_a_reference_that_was_read_is_refused_with_its_reason(desk):
    desk.offer()
    for rank in range(4):
        desk.claim(rank)
        desk.done(rank)
    assert refused(desk.claim()) == "released"


def test_f3_a_reader_that_is_done_may_not_claim_again(desk):
    desk.offer()
    desk.claim(0)
    desk.done(0)
    assert refused(desk.claim(0)) == "released"


def test_f5_an_expired_reference_is_refused_even_before_the_tick(desk):
    desk.offer(lease_s=2.0)
    desk.clock.advance(2.0)
    assert refused(desk.claim()) == "expired"
    assert desk.sent() == {"X"}


def test_t38_expiry_needs_no_new_work(desk):
    desk.offer(lease_s=2.0)
    deadline = desk.producer.next_deadline()
    assert deadline == desk.clock() + 2.0
    desk.producer.tick(deadline)
    assert desk.sent() == {"X"}


def test_t34_claims_and_renewals_extend_and_never_shorten(desk):
    desk.offer(lease_s=30.0)
    assert granted(desk.claim()) == 30.0
    desk.clock.advance(25.0)
    (renewed,) = desk.renew()
    assert isinstance(renewed, Renewed)
    assert renewed.items[0].lease_s == 20.0
    desk.tick(19.9)
    assert not desk.sent()
    desk.tick(0.2)
    assert desk.sent() == {"X"}


def test_t34_a_dead_readers_blocks_come_back_within_the_extension_of_its_last_beat(desk):
    desk.offer(lease_s=30.0)
    for rank in range(4):
        desk.claim(rank)
    desk.tick(28.0)
    desk.renew()
    desk.tick(20.0)
    assert desk.sent() == {"X"}


def test_a_renewal_says_what_is_lost_and_is_silent_about_what_may_come(desk):
    desk.offer("X")
    desk.offer("Z", lease_s=1.0)
    desk.tick(1.5)
    items = tuple(Reference(name, "g1") for name in ("X", "Y", "Z"))
    (answer,) = desk.say(Renew(reader=Party("D", 0), number=5, items=items))
    assert [item.request_id for item in answer.items] == ["X"]
    assert [(item.request_id, item.reason) for item in answer.lost] == [("Z", "expired")]
    assert answer.number == 5


def test_a_renewal_of_an_offer_that_another_engine_reads_extends_nothing(desk):
    desk.introduce("E")
    desk.offer()
    desk.claim()
    (answer,) = desk.renew(engine="E")
    assert [item.reason for item in answer.lost] == ["claimed_by_another"]


def test_t22_one_release_frees_the_offer_once(desk):
    desk.offer()
    assert isinstance(desk.release()[0], Released)
    assert desk.sent() == {"X"}
    assert isinstance(desk.release()[0], Released)
    assert not desk.sent()
    assert desk.count("releases") == 1
    assert refused(desk.claim()) == "released"


def test_t39_release_of_an_unknown_id_is_answered_at_once_and_remembered_for_the_offer(desk):
    assert isinstance(desk.release()[0], Released)
    desk.offer()
    assert desk.sent() == {"X"}


def test_t35_a_release_does_not_free_what_another_rank_reads(desk):
    desk.offer()
    granted(desk.claim(1))
    desk.release(rank=0)
    assert not desk.sent()
    assert refused(desk.claim(2)) == "released"
    granted(desk.claim(1))
    desk.done(1)
    assert desk.sent() == {"X"}


def test_a_release_of_another_engine_frees_nothing_that_is_read(desk):
    desk.introduce("E")
    desk.offer()
    desk.claim(0)
    desk.release(engine="E")
    for rank in range(4):
        granted(desk.claim(rank))


def test_t35_a_withdrawn_offer_stays_pinned_until_its_readers_are_done(desk):
    desk.offer()
    desk.claim(0)
    desk.claim(1)
    desk.producer.withdraw("X")
    assert refused(desk.claim(2)) == "withdrawn"
    desk.done(0)
    assert not desk.sent()
    desk.done(1)
    assert desk.sent() == {"X"}


def test_f9_a_withdrawn_offer_that_nobody_reads_is_free_at_once(desk):
    desk.offer()
    desk.producer.withdraw("X")
    desk.producer.withdraw("X")
    desk.producer.withdraw("unheard of")
    assert desk.sent() == {"X"}
    assert refused(desk.claim()) == "withdrawn"


@pytest.mark.parametrize("how", ["withdraw", "release"])
def test_an_offer_that_is_shut_between_its_readers_is_free_at_once(desk, how):
    desk.offer()
    desk.claim(0)
    desk.done(0)
    if how == "withdraw":
        desk.producer.withdraw("X")
    else:
        desk.release()
    assert desk.sent() == {"X"}


def test_tables_that_are_not_those_that_were_offered_are_refused(desk):
    desk.offer()
    assert refused(desk.claim(digest=tables_digest((BlockTable(0, (7, 3, 8)),), 10))) == "tables_differ"
    assert refused(desk.claim(digest=tables_digest(TABLES, 11))) == "tables_differ"
    granted(desk.claim(digest=tables_digest(TABLES, 10)))


def test_a_rank_that_the_election_does_not_name_is_refused():
    desk = Desk(p_parallel=2, rank=0)
    desk.introduce(parallel=2)
    desk.offer()
    granted(desk.claim(0))
    assert refused(desk.claim(1)) == "not_elected"


def test_an_engine_that_has_not_introduced_itself_is_told_so():
    desk = Desk()
    desk.offer()
    assert refused(desk.claim()) == "not_introduced"


def test_an_introduction_meant_for_another_engine_is_refused(desk):
    body = to_body(layout("D", 1))
    (answer,) = desk.say(Introduce(producer=Party("old", 0), engine_id="D", layout=body))
    assert isinstance(answer, IntroduceRefused)
    assert answer.reason == "engine_restarted"


def test_an_introduction_waits_for_the_ranks_own_layout():
    desk = Desk()
    desk.producer = Producer(identity=Identity("P", 0, 1), config=desk.config, stats=desk.stats)
    (answer,) = desk.introduce()
    assert answer.reason == "not_ready"


def test_f16_an_introduction_with_an_unsound_or_unfit_layout_is_refused(desk):
    body = to_body(layout("D", 1))
    alien = to_body(engine("D", Shape(1, 4, 4, "HND", "split"), 9, num_layers=1, num_blocks=3, base=1 << 20))
    for bad in (alien, body.__class__(**{**_fields(body), "axes": body.axes[:1]})):
        (answer,) = desk.say(Introduce(producer=desk.me, engine_id="D", layout=bad))
        assert isinstance(answer, IntroduceRefused)
        assert answer.reason == "incompatible"


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_t46b_an_engine_that_is_known_is_not_replaced_by_one_of_its_name(desk):
    assert isinstance(desk.introduce()[0], Introduced)
    (answer,) = desk.introduce(parallel=2)
    assert isinstance(answer, IntroduceRefused)
    assert "another layout" in answer.detail
    desk.offer()
    granted(desk.claim(3))


def test_a_message_that_is_not_for_a_producer_is_counted(desk):
    assert desk.say(NotReady()) == []
    assert desk.count("unexpected_messages") == 1


def test_f14_offers_beyond_the_limit_are_freed_at_once():
    desk = Desk(max_offers=2)
    desk.introduce()
    for name in "ABC":
        desk.offer(name)
    assert desk.sent() == {"C"}
    assert refused(desk.claim(request_id="C")) == "overloaded"
    granted(desk.claim(request_id="A"))


def test_f14_parked_claims_beyond_the_limit_are_refused_at_once():
    desk = Desk(max_parked=2)
    desk.introduce()
    assert desk.claim(request_id="A") == []
    assert desk.claim(request_id="B") == []
    assert refused(desk.claim(request_id="C")) == "overloaded"


def test_what_is_remembered_is_bounded(desk):
    desk = Desk(max_remembered=3)
    desk.introduce()
    for name in "ABCDE":
        desk.offer(name)
        desk.release(name)
    assert refused(desk.claim(request_id="E")) == "released"
    assert desk.claim(request_id="A") == []
    assert refused(desk.tick(100.0)) == "unknown"


def test_f15_a_closing_producer_refuses_new_claims(desk):
    desk.offer()
    desk.claim(0)
    desk.producer.close()
    assert refused(desk.claim(1)) == "closing"
    assert desk.producer.offers.num_claimed == 1
    desk.done(0)
    assert desk.producer.offers.num_claimed == 0
