"""Every life in a session as an enum, a transition table and one ``advance``. No messages, no clocks.

Six things live at different times and end for different reasons::

    offer      the producer's blocks of one request       OPEN -> CLAIMED -> ENDED, CLOSING while readers finish
    claim      one reader's hold on one offer, here       ASKED -> GRANTED -> ENDED, or REFUSED
    piece      one batch that a transport writes          WAITING -> POSTED -> ARRIVED, or FAILED;
                                                          staged ones are SCATTERING before they are ARRIVED
    read       one local request                          WAITING -> READING -> RECEIVED, or DRAINING -> FAILED;
                                                          some are VERIFYING before they are RECEIVED
    peer       one remote engine                          ASKING -> READY, SUSPECT, REFUSED, GONE
    link       the control connection to one of its ranks NEW -> INTRODUCING -> READY, and back when it is lost
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

from kvplan.errors import IllegalTransitionError

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class OfferState(Enum):
    """The producer's blocks of one request."""

    OPEN = auto()
    """Nobody reads yet; the lease runs."""
    CLAIMED = auto()
    """At least one reader has been granted."""
    CLOSING = auto()
    """No new reader is let in; running ones pin the blocks until they end or their lease does."""
    ENDED = auto()
    """The blocks are free on this rank."""


class OfferEvent(Enum):
    """What happens to an offer."""

    CLAIM = auto()
    READER_DONE = auto()
    LAST_DONE = auto()
    SHUT = auto()
    """Withdrawn by the producer, or released by the consumer."""
    EXPIRE = auto()


class ClaimState(Enum):
    """A consumer's view of one claim."""

    ASKED = auto()
    GRANTED = auto()
    REFUSED = auto()
    """Refused, or lost later: bytes must not be believed."""
    ENDED = auto()
    """``done`` is on its way."""


class ClaimEvent(Enum):
    """What happens to a claim."""

    GRANT = auto()
    REFUSE = auto()
    END = auto()


class PieceState(Enum):
    """One batch of a read."""

    WAITING = auto()
    POSTED = auto()
    """A carrier may write: nobody else may touch the blocks, whatever has been decided since."""
    SCATTERING = auto()
    """It lies in staging and is copied into the blocks; the same holds."""
    ARRIVED = auto()
    FAILED = auto()


class PieceEvent(Enum):
    """What happens to a piece."""

    POST = auto()
    SCATTER = auto()
    ARRIVE = auto()
    FAIL = auto()
    RETRY = auto()
    DROP = auto()
    """Given up before it was posted."""


class ReadState(Enum):
    """One local request."""

    WAITING = auto()
    """For first contact with the peer."""
    READING = auto()
    VERIFYING = auto()
    """Everything is here; the bytes are compared with the producer's."""
    DRAINING = auto()
    """Has failed; a write into its blocks is outstanding."""
    RECEIVED = auto()
    FAILED = auto()


class ReadEvent(Enum):
    """What happens to a read."""

    BEGIN = auto()
    FAIL = auto()
    VERIFY = auto()
    SUCCEED = auto()
    DRAINED = auto()


class PeerState(Enum):
    """One remote engine."""

    ASKING = auto()
    """The hello is on its way."""
    READY = auto()
    """The plan is proved."""
    SUSPECT = auto()
    """A connection was lost; the hello is asked for again."""
    REFUSED = auto()
    """Must not be read from; remembered so that requests fail fast."""
    GONE = auto()
    """Ended or replaced; forgotten when its last transfer has ended."""


class PeerEvent(Enum):
    """What happens to a peer."""

    HELLO = auto()
    """It answered as the engine that we mean, and fits."""
    REFUSE = auto()
    DOUBT = auto()
    VANISH = auto()


class LinkState(Enum):
    """The control connection to one rank of a peer."""

    NEW = auto()
    INTRODUCING = auto()
    READY = auto()
    """The rank knows who we are."""


class LinkEvent(Enum):
    """What happens to a link."""

    INTRODUCE = auto()
    WELCOME = auto()
    RESET = auto()
    """The connection was lost, or the rank has forgotten us."""


OFFER: Mapping[tuple[OfferState, OfferEvent], OfferState] = {
    (OfferState.OPEN, OfferEvent.CLAIM): OfferState.CLAIMED,
    (OfferState.OPEN, OfferEvent.READER_DONE): OfferState.OPEN,
    (OfferState.OPEN, OfferEvent.LAST_DONE): OfferState.ENDED,
    (OfferState.OPEN, OfferEvent.SHUT): OfferState.ENDED,
    (OfferState.OPEN, OfferEvent.EXPIRE): OfferState.ENDED,
    (OfferState.CLAIMED, OfferEvent.CLAIM): OfferState.CLAIMED,
    (OfferState.CLAIMED, OfferEvent.READER_DONE): OfferState.CLAIMED,
    (OfferState.CLAIMED, OfferEvent.LAST_DONE): OfferState.ENDED,
    (OfferState.CLAIMED, OfferEvent.SHUT): OfferState.CLOSING,
    (OfferState.CLAIMED, OfferEvent.EXPIRE): OfferState.ENDED,
    (OfferState.CLOSING, OfferEvent.READER_DONE): OfferState.CLOSING,
    (OfferState.CLOSING, OfferEvent.LAST_DONE): OfferState.ENDED,
    (OfferState.CLOSING, OfferEvent.SHUT): OfferState.CLOSING,
    (OfferState.CLOSING, OfferEvent.EXPIRE): OfferState.ENDED,
}

CLAIM: Mapping[tuple[ClaimState, ClaimEvent], ClaimState] = {
    (ClaimState.ASKED, ClaimEvent.GRANT): ClaimState.GRANTED,
    (ClaimState.ASKED, ClaimEvent.REFUSE): ClaimState.REFUSED,
    (ClaimState.ASKED, ClaimEvent.END): ClaimState.ENDED,
    (ClaimState.GRANTED, ClaimEvent.GRANT): ClaimState.GRANTED,
    (ClaimState.GRANTED, ClaimEvent.REFUSE): ClaimState.REFUSED,
    (ClaimState.GRANTED, ClaimEvent.END): ClaimState.ENDED,
}

PIECE: Mapping[tuple[PieceState, PieceEvent], PieceState] = {
    (PieceState.WAITING, PieceEvent.POST): PieceState.POSTED,
    (PieceState.WAITING, PieceEvent.FAIL): PieceState.FAILED,
    (PieceState.WAITING, PieceEvent.DROP): PieceState.FAILED,
    (PieceState.POSTED, PieceEvent.ARRIVE): PieceState.ARRIVED,
    (PieceState.POSTED, PieceEvent.FAIL): PieceState.FAILED,
    (PieceState.POSTED, PieceEvent.SCATTER): PieceState.SCATTERING,
    (PieceState.SCATTERING, PieceEvent.ARRIVE): PieceState.ARRIVED,
    (PieceState.SCATTERING, PieceEvent.FAIL): PieceState.FAILED,
    (PieceState.FAILED, PieceEvent.RETRY): PieceState.WAITING,
}

READ: Mapping[tuple[ReadState, ReadEvent], ReadState] = {
    (ReadState.WAITING, ReadEvent.BEGIN): ReadState.READING,
    (ReadState.WAITING, ReadEvent.FAIL): ReadState.DRAINING,
    (ReadState.READING, ReadEvent.FAIL): ReadState.DRAINING,
    (ReadState.READING, ReadEvent.SUCCEED): ReadState.RECEIVED,
    (ReadState.READING, ReadEvent.VERIFY): ReadState.VERIFYING,
    (ReadState.VERIFYING, ReadEvent.FAIL): ReadState.DRAINING,
    (ReadState.VERIFYING, ReadEvent.SUCCEED): ReadState.RECEIVED,
    (ReadState.DRAINING, ReadEvent.DRAINED): ReadState.FAILED,
}

PEER: Mapping[tuple[PeerState, PeerEvent], PeerState] = {
    (PeerState.ASKING, PeerEvent.HELLO): PeerState.READY,
    (PeerState.ASKING, PeerEvent.REFUSE): PeerState.REFUSED,
    (PeerState.ASKING, PeerEvent.VANISH): PeerState.GONE,
    (PeerState.READY, PeerEvent.DOUBT): PeerState.SUSPECT,
    (PeerState.READY, PeerEvent.VANISH): PeerState.GONE,
    (PeerState.SUSPECT, PeerEvent.DOUBT): PeerState.SUSPECT,
    (PeerState.SUSPECT, PeerEvent.HELLO): PeerState.READY,
    (PeerState.SUSPECT, PeerEvent.VANISH): PeerState.GONE,
    (PeerState.REFUSED, PeerEvent.VANISH): PeerState.GONE,
}

LINK: Mapping[tuple[LinkState, LinkEvent], LinkState] = {
    (LinkState.NEW, LinkEvent.INTRODUCE): LinkState.INTRODUCING,
    (LinkState.NEW, LinkEvent.RESET): LinkState.NEW,
    (LinkState.INTRODUCING, LinkEvent.INTRODUCE): LinkState.INTRODUCING,
    (LinkState.INTRODUCING, LinkEvent.WELCOME): LinkState.READY,
    (LinkState.INTRODUCING, LinkEvent.RESET): LinkState.NEW,
    (LinkState.READY, LinkEvent.WELCOME): LinkState.READY,
    (LinkState.READY, LinkEvent.RESET): LinkState.NEW,
}


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """Return the state after an event; raises ``IllegalTransitionError`` when the table has none.

    >>> advance(OFFER, OfferState.OPEN, OfferEvent.CLAIM)
    <OfferState.CLAIMED: 2>
    """
    after = table.get((state, event))
    if after is None:
        raise IllegalTransitionError(f"{type(state).__name__} {state.name} does not allow {event.name}")
    return after


def is_allowed(table: Mapping[tuple[S, E], S], state: S, event: E) -> bool:
    """Return whether the table has a transition."""
    return (state, event) in table
