"""What it means that a read's time is over. Decides nothing else, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.session.lifecycle import ClaimState, ReadState
from kvplan.session.nouns import Failure

if TYPE_CHECKING:
    from kvplan.session.reads import Read


def overdue(read: Read, now: float, *, ends_at: float, last_answer: str, knows_own: bool) -> Failure | None:
    """Return the failure of a read whose time for its present stage is over; None when the stage may go on.

    ``ends_at`` is the end of its whole time, ``last_answer`` what the front desk said last.
    """
    peer = read.peer
    if read.state is ReadState.WAITING:
        own = "" if knows_own else "; this engine's own front desk has not told its layout yet"
        return Failure("handshake_timeout", f"engine {peer.engine_id} at {peer.desk}: {last_answer}{own}")
    if read.state is not ReadState.READING:
        return None
    asked = [source.link.them.rank for source in read.sources if source.claim is ClaimState.ASKED]
    if asked:
        return Failure("claim_unanswered", f"ranks {asked} of engine {peer.engine_id}")
    if now < ends_at:
        return None
    here = all(source.arrived_at is not None for source in read.sources)
    reason = "lease_lost" if here else "transfer_timeout"
    return Failure(reason, f"after {now - read.began_at:.1f} s, engine {peer.engine_id}")
