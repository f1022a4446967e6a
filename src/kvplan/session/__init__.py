"""The session: who may touch which blocks until when. No byte arithmetic, no engine."""

from kvplan.session.config import Identity, SessionConfig
from kvplan.session.front_desk import FrontDesk
from kvplan.session.nouns import REASONS, Failure, Offer, RankHello, ReadRequest, RemoteRef, Results
from kvplan.session.rank import RankSession

__all__ = [
    "REASONS",
    "Failure",
    "FrontDesk",
    "Identity",
    "Offer",
    "RankHello",
    "RankSession",
    "ReadRequest",
    "RemoteRef",
    "Results",
    "SessionConfig",
]
