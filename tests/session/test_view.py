"""What front desks and ranks tell people who ask: true, bounded, and without disturbing what they look at."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest

from kvplan.errors import UnavailableError
from kvplan.session import Identity, Offer, RemoteRef, SessionConfig
from kvplan.session.nouns import Failure, ReadRequest
from kvplan.session.offers import OfferBook
from kvplan.session.reports import Reports
from kvplan.session.stats import Stats
from kvplan.session.view import MAX_LOOKED_AT, Describer, failure_lines, lease_lines
from kvplan.testing.clock import FakeClock
from kvplan.version import __version__
from kvplan.wire.addresses import Address, parse_address
from kvplan.wire.asking import Asker
from kvplan.wire.codec import PROTOCOL_VERSION, decode, encode
from kvplan.wire.messages import HelloRequest
from kvplan.wire.status import MAX_LINES, StatusRequest
from tests.session.engines import COMPATIBILITY, D_SHAPE, P_SHAPE, QUICK, Engine, pair, wait_until

PATIENT = replace(QUICK, claim_park_s=20.0, claim_timeout_s=30.0, transfer_timeout_s=30.0, handshake_timeout_s=20.0)


def desk_of(engine):
    return Address("127.0.0.1", engine.desk.port)


def ranks_of(engine):
    return [parse_address(session.hello().control_address) for session in engine.sessions]


def ask(asker, address):
    return asker.ask(address, StatusRequest(), timeout_s=5.0)


def test_a_front_desk_names_its_ranks_and_each_rank_answers_for_itself():
    with pair() as (prefill, _), Asker() as asker:
        desk = ask(asker, desk_of(prefill))
        assert (desk.role, desk.engine_id, desk.num_ranks) == ("front_desk", "prefill-0", 2)
        assert (desk.version, desk.protocol) == (__version__, PROTOCOL_VERSION)
        assert desk.facts == COMPATIBILITY
        assert [parse_address(card.control_address) for card in desk.ranks] == ranks_of(prefill)
        for index, address in enumerate(ranks_of(prefill)):
            rank = ask(asker, address)
            assert (rank.role, rank.rank, rank.num_ranks, rank.transport) == ("rank", index, 2, "memory")
            assert rank.values == {**prefill.sessions[index].stats(), "status_requests": 1.0}


def test_a_front_desk_without_ranks_is_not_ready():
    engine = Engine("late-0", P_SHAPE).start(publish=False)
    try:
        with Asker() as asker:
            with pytest.raises(UnavailableError, match="not ready"):
                ask(asker, desk_of(engine))
            engine.publish()
            assert ask(asker, desk_of(engine)).uptime_s < 60
    finally:
        engine.close()


def test_a_front_desk_still_answers_hello_and_refuses_the_rest():
    with pair() as (prefill, _), Asker() as asker:
        assert asker.ask(desk_of(prefill), HelloRequest()).engine_id == "prefill-0"
        assert asker.ask(desk_of(prefill), StatusRequest()).engine_id == "prefill-0"


def test_a_read_that_waits_says_for_what_and_peers_their_state():
    with pair(d_options={"config": PATIENT}, p_options={"config": PATIENT}) as (prefill, decode), Asker() as asker:
        early = prefill.reference("early", prefill.table(24), 24)
        decode.read("local-early", early, decode.table(24))
        nobody = replace(early, engine_id="nobody-0", port=1)
        decode.read("local-lost", nobody, decode.table(24))
        [address, *_] = ranks_of(decode)

        def waits():
            reads = {read.request_id: read for read in ask(asker, address).reads}
            return reads if len(reads) == 2 and "grant" in reads["local-early"].waits_for else None

        reads = wait_until(waits)
        assert reads["local-lost"].waits_for == "hello"
        assert reads["local-lost"].state == "waiting"
        assert reads["local-early"].state == "reading"
        assert reads["local-early"].num_bytes > 0
        peers = {peer.engine_id: peer for peer in ask(asker, address).peers}
        assert (peers["prefill-0"].state, peers["prefill-0"].num_reads) == ("ready", 1)
        assert peers["nobody-0"].state == "asking"
        producer = ask(asker, ranks_of(prefill)[0])
        assert producer.values["parked_messages"] >= 1


def test_leases_are_told_with_their_reader_and_how_long_they_last():
    with pair(d_options={"config": PATIENT}, p_options={"config": PATIENT}) as (prefill, decode), Asker() as asker:
        tables = prefill.table(24)
        prefill.fill(tables)
        remote = prefill.offer("r1", tables, 24, lease_s=20.0)
        address = ranks_of(prefill)[0]
        [lease] = wait_until(lambda: ask(asker, address).leases)
        assert (lease.request_id, lease.state, lease.reader) == ("r1", "open", "")
        assert 15 < lease.left_s <= 20
        decode.read("local", remote, decode.table(24), ranks=[0])
        claimed = wait_until(lambda: [one for one in ask(asker, address).leases if one.reader])
        assert claimed[0].reader == "decode-0"
        assert claimed[0].num_reading + claimed[0].num_done == 1


def test_failures_are_told_the_latest_first():
    with pair() as (prefill, decode), Asker() as asker:
        used = prefill.offer("r1", prefill.table(24), 24)
        decode.read("first", used, decode.table(24))
        wait_until(lambda: decode.received("first"))
        for name in ("second", "third"):
            decode.read(name, used, decode.table(24))
            wait_until(lambda name=name: decode.failures(name))
        failures = ask(asker, ranks_of(decode)[0]).failures
        assert [line.request_id for line in failures] == ["third", "second"]
        assert failures[0].engine_id == "prefill-0"
        assert failures[0].address == f"127.0.0.1:{prefill.desk.port}"
        assert failures[0].age_s <= failures[1].age_s


def test_questions_do_not_disturb_what_runs():
    with pair() as (prefill, decode), Asker() as asker:
        addresses = [desk_of(prefill), desk_of(decode), *ranks_of(prefill), *ranks_of(decode)]
        for number in range(5):
            remote = prefill.offer(f"r{number}", prefill.table(24), 24)
            decode.read(f"local-{number}", remote, decode.table(24))
            for _ in range(5):
                answers = asker.ask_all(dict.fromkeys(addresses, StatusRequest()))
                assert all(not isinstance(answer, UnavailableError) for answer in answers.values())
            wait_until(lambda number=number: decode.received(f"local-{number}"))
        assert decode.total("loop_errors") + prefill.total("loop_errors") == 0
        assert prefill.total("unexpected_messages") == 0


def test_the_view_of_a_sleeping_reader_is_the_latest():
    with pair(d_shape=replace(D_SHAPE, parallel=1)) as (prefill, decode), Asker() as asker:
        remote = prefill.offer("r1", prefill.table(24), 24)
        decode.read("local", remote, decode.table(24))
        wait_until(lambda: decode.received("local"))
        status = wait_until(lambda: [s for s in [ask(asker, ranks_of(decode)[0])] if not s.reads])[0]
        assert [(peer.engine_id, peer.num_reads) for peer in status.peers] == [("prefill-0", 0)]


def test_a_status_is_bounded_however_much_there_is():
    clock = FakeClock(1000.0)
    stats = Stats(clock=clock)
    offers = OfferBook(config=SessionConfig(), stats=stats)
    for number in range(3 * MAX_LOOKED_AT):
        offers.add(Offer(f"{number:05}" + "x" * 600, "g", (), 16, 30.0 + number % 7), clock())
    reports = Reports(stats)
    long = "y" * 10_000
    for number in range(100):
        remote = RemoteRef(long, long, 1, long, long, (), 16)
        reports.failed(ReadRequest(f"{number}{long}", remote, ()), Failure("expired", long))
    began_at = time.perf_counter()
    lines = lease_lines(offers, clock())
    assert time.perf_counter() - began_at < 1.0
    assert len(lines) == MAX_LINES
    assert [line.left_s for line in lines] == [30.0] * MAX_LINES
    describer = Describer(identity=Identity("e" * 512, 0, 1), transport="memory", stats=stats, clock=clock)
    frame = encode(describer.status(offers))
    assert len(frame) < 256 << 10
    status = decode(frame)
    assert len(status.failures) == len(failure_lines(stats)) <= MAX_LINES
    assert status.values["live_offers"] == 0  # the gauge is the loop's business


def test_an_offer_that_expires_leaves_one_line(caplog):
    offers = OfferBook(config=SessionConfig(), stats=Stats())
    offers.add(Offer("cmpl-1", "g", (), 16, lease_s=2.0), 5.0)
    with caplog.at_level(logging.WARNING, logger="kvplan"):
        offers.expire(8.0)
    [record] = caplog.records
    assert record.getMessage().startswith('offer expired request=cmpl-1 reader=nobody reading=0 do="')


def test_a_lease_that_is_not_known_has_ended():
    offers = OfferBook(config=SessionConfig(), stats=Stats())
    offers.add(Offer("r", "g", (), 16), 5.0)
    [key] = offers.live()
    assert offers.ends_at(key) == 35.0
    offers.shut_request("r", "withdrawn")
    assert offers.ends_at(key) == 0.0
