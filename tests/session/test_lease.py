"""Leases: what expires when, on a clock that is moved by hand."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kvplan.session.lease import LeaseBook


def book(**deadlines):
    leases = LeaseBook[str]()
    for key, deadline in deadlines.items():
        leases.extend(key, deadline)
    return leases


def test_t34_a_heartbeat_moves_one_lease_and_the_others_end():
    leases = book(A=30.0, B=31.0, C=32.0)
    leases.extend("A", 300.0)
    assert leases.expire(40.0) == ["B", "C"]
    assert "A" in leases


def test_t34_order_of_insertion_does_not_matter():
    leases = book(X=480.0, Y=30.0)
    assert leases.next_deadline() == 30.0
    assert leases.expire(31.0) == ["Y"]
    assert leases.next_deadline() == 480.0


def test_t34_a_heartbeat_never_shortens():
    leases = book(A=30.0)
    assert leases.extend("A", 20.0) == 30.0
    assert leases.expire(29.9) == []
    assert leases.expire(30.0) == ["A"]


def test_t34_defaults_survive_two_missed_beats_and_free_a_dead_readers_blocks_in_time():
    lease_s, beat_s, extension_s = 30.0, 5.0, 20.0
    leases = book(live=lease_s)
    last = 0.0
    for beat in (5.0, 10.0, 25.0, 30.0, 45.0):
        assert leases.expire(beat) == []
        leases.extend("live", beat + extension_s)
        last = beat
    assert leases.expire(last + extension_s - 0.1) == []
    assert leases.expire(last + extension_s) == ["live"]
    assert extension_s >= 3 * beat_s


def test_an_ended_lease_does_not_expire_and_may_begin_again():
    leases = book(A=10.0)
    leases.end("A")
    leases.end("A")
    assert leases.expire(20.0) == []
    assert leases.extend("A", 15.0) == 15.0
    assert leases.expire(16.0) == ["A"]


def test_many_renewals_do_not_grow_the_book():
    leases = book(A=1.0, B=2.0)
    for beat in range(10_000):
        leases.extend("A", float(beat + 10))
    assert len(leases._heap) < 200


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("extend"), st.sampled_from("abcde"), st.integers(0, 50)),
            st.tuples(st.just("end"), st.sampled_from("abcde"), st.just(0)),
            st.tuples(st.just("expire"), st.just(""), st.integers(0, 50)),
        ),
        max_size=60,
    )
)
def test_the_book_behaves_like_a_dictionary_of_maxima(actions):
    leases, model = LeaseBook[str](), {}
    for action, key, time in actions:
        if action == "extend":
            model[key] = max(model.get(key, -math.inf), time)
            assert leases.extend(key, time) == model[key]
        elif action == "end":
            model.pop(key, None)
            leases.end(key)
        else:
            due = {k for k, deadline in model.items() if deadline <= time}
            assert set(leases.expire(time)) == due
            model = {k: deadline for k, deadline in model.items() if k not in due}
        assert leases.next_deadline() == min(model.values(), default=None)
        assert {k for k in "abcde" if k in leases} == model.keys()
