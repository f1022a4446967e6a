"""The transition tables: every state can be reached, ends are ends, and nothing else is allowed."""

import itertools

import pytest

from kvplan.errors import IllegalTransitionError
from kvplan.session import lifecycle
from kvplan.session.lifecycle import advance, is_allowed

MACHINES = {
    "offer": (lifecycle.OFFER, lifecycle.OfferState, lifecycle.OfferEvent, "OPEN", {"ENDED"}),
    "claim": (lifecycle.CLAIM, lifecycle.ClaimState, lifecycle.ClaimEvent, "ASKED", {"REFUSED", "ENDED"}),
    "piece": (lifecycle.PIECE, lifecycle.PieceState, lifecycle.PieceEvent, "WAITING", {"ARRIVED"}),
    "read": (lifecycle.READ, lifecycle.ReadState, lifecycle.ReadEvent, "WAITING", {"RECEIVED", "FAILED"}),
    "peer": (lifecycle.PEER, lifecycle.PeerState, lifecycle.PeerEvent, "ASKING", {"GONE"}),
    "link": (lifecycle.LINK, lifecycle.LinkState, lifecycle.LinkEvent, "NEW", set()),
}


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_is_reached_and_only_ends_have_no_exit(name):
    table, states, _, start, ends = MACHINES[name]
    reached, new = set(), {states[start]}
    while new:
        reached |= new
        new = {after for (state, _), after in table.items() if state in reached} - reached
    assert reached == set(states)
    assert {state.name for state in states if not any(s is state for s, _ in table)} == ends


@pytest.mark.parametrize("name", MACHINES)
def test_every_pair_is_in_the_table_or_illegal(name):
    table, states, events, _, _ = MACHINES[name]
    for state, event in itertools.product(states, events):
        if is_allowed(table, state, event):
            assert advance(table, state, event) is table[state, event]
        else:
            with pytest.raises(IllegalTransitionError, match=f"{state.name} does not allow {event.name}"):
                advance(table, state, event)


def test_a_refused_claim_can_never_be_granted():
    assert not is_allowed(lifecycle.CLAIM, lifecycle.ClaimState.REFUSED, lifecycle.ClaimEvent.GRANT)


def test_a_posted_piece_cannot_be_dropped():
    assert not is_allowed(lifecycle.PIECE, lifecycle.PieceState.POSTED, lifecycle.PieceEvent.DROP)


def test_a_failed_read_is_reported_only_through_draining():
    before = {state for (state, _), after in lifecycle.READ.items() if after is lifecycle.ReadState.FAILED}
    assert before == {lifecycle.ReadState.DRAINING}
