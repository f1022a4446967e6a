"""One verified read and its checks, one per rank that it has read from: what is known, what follows. Asks nobody."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvplan.errors import UnsupportedError
from kvplan.session.descent import Descent
from kvplan.session.digest import Share, check_host_memory, spot
from kvplan.session.lifecycle import LinkState
from kvplan.session.nouns import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.session.digest import Digests
    from kvplan.session.reads import Read, Source
    from kvplan.wire.messages import Party

FEATURE = "digest"
"""What the hello of a peer must name for its ranks to be asked."""


class Mismatch(NamedTuple):
    """A wrong atom, or as much as is known of it."""

    place: tuple[int, ...]
    """In the order of the declarations, coordinates and tokens: the first of several is told."""
    text: str


@dataclass(slots=True, eq=False)
class Check:
    """One rank that a read has read from."""

    source: Source
    here: Share
    there: Share
    """The same as it lies at the producer: to name its addresses, not to look at its bytes."""
    descent: Descent
    number: int = 0
    """Of the question that is open."""
    ask_at: float = -math.inf
    """When to ask (again)."""
    is_busy: bool = False
    """Whether a worker is at it."""
    ours: Digests | None = None
    theirs: Digests | None = None
    mismatch: Mismatch | None = None
    failure: Failure | None = None

    @property
    def name(self) -> str:
        """The producer's rank, for people."""
        return rank_name(self.source.link.them)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to learn."""
        through = self.descent.is_over and (not self.descent.differing or self.mismatch is not None)
        return through or self.failure is not None

    @property
    def needs_name(self) -> bool:
        """Whether the wrong atom is found, and nobody is working out what it is called."""
        return self.descent.is_over and not self.is_over and not self.is_busy

    @property
    def needs_ours(self) -> bool:
        """Whether the bytes here are to be looked at."""
        return not (self.is_over or self.descent.is_over or self.is_busy) and self.ours is None

    @property
    def needs_theirs(self) -> bool:
        """Whether the producer is to be asked, or asked again; a rank that does not know us would only say so."""
        known = self.source.link.state is LinkState.READY
        return known and not (self.is_over or self.descent.is_over) and self.theirs is None

    @property
    def needs_anything(self) -> bool:
        """Whether there is something to do that no answer or result must come before."""
        return self.needs_name or self.needs_ours or self.needs_theirs

    def step(self) -> None:
        """Go on to the next question when both sides have answered the present one."""
        if self.ours is not None and self.theirs is not None and not self.is_over:
            self.descent.take(self.ours, self.theirs)
            self.ours = self.theirs = None
            self.number, self.ask_at = 0, -math.inf

    def named(self, me: Party, order: Mapping[tuple[str, str], int]) -> Mismatch:
        """Return what is wrong, with coordinates and addresses. Walks block tables: takes a while for long requests."""
        descent = self.descent
        key = (descent.scope.layer, descent.scope.component)
        place = order.get(key, len(order))
        what = f"layer {key[0]!r} component {key[1]!r}"
        extent = f"{descent.differing} of {descent.components} components from that rank differ"
        if descent.found is None:
            why = f"{rank_name(me)} and {self.name} disagree: {descent.note}"
            return Mismatch((place,), f"{what}: {why}; {extent}")
        here, there = (
            spot(share, *key, descent.found.strand, descent.found.token) for share in (self.here, self.there)
        )
        where = ", ".join(f"{name} {value}" for name, value in here.coordinates.items())
        ours, theirs = (f"{x.address:#x} of {name}" for x, name in ((here, rank_name(me)), (there, self.name)))
        wrong = f"the {here.num_bytes} bytes at {ours} are not those at {theirs}"
        return Mismatch((place, *here.coordinates.values()), f"{what} {where}: {wrong}; {extent}")


@dataclass(slots=True, eq=False)
class Inquiry:
    """One read that is verified."""

    read: Read
    began_at: float
    ends_at: float
    checks: list[Check] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether every rank's check is."""
        return all(check.is_over for check in self.checks)

    def failure(self, seconds: float) -> Failure | None:
        """Return what the checks come to after some time; the first wrong atom of all ranks counts most."""
        wrong = [check.mismatch for check in self.checks if check.mismatch]
        if wrong:
            return Failure("digest_mismatch", min(wrong).text)
        unnamed = next((check for check in self.checks if check.descent.differing), None)
        if unnamed is not None:
            scope = unnamed.descent.scope
            what = f"layer {scope.layer!r} component {scope.component!r} from {unnamed.name}"
            return Failure("digest_mismatch", f"{what} is wrong; where was not found within {seconds:.1f} s")
        failed = next((check.failure for check in self.checks if check.failure), None)
        late = ", ".join(check.name for check in self.checks if not check.is_over)
        if failed is None and late:
            return Failure("verify_failed", f"no digests of {late} within {seconds:.1f} s")
        return failed


def begun(read: Read, me: Party, order: Mapping[tuple[str, str], int], now: float, ends_at: float) -> Inquiry:
    """Return the inquiry into a read whose bytes are here; checks that cannot be made have failed already."""
    remote, tables = read.request.remote, read.request.tables
    inquiry = Inquiry(read, now, ends_at)
    for plan, source in zip(read.peer.plans, read.sources, strict=True):
        here, there = (
            Share(plan, side, remote.tables, tables, remote.num_tokens) for side in ("destination", "source")
        )
        check = Check(source, here, there, Descent(order))
        check.failure = _unsupported(check, me)
        inquiry.checks.append(check)
    return inquiry


def rank_name(party: Party) -> str:
    """Return how people call a rank."""
    return f"rank {party.rank} of engine {party.engine_id}"


def _unsupported(check: Check, me: Party) -> Failure | None:
    """Return why digests of a pair of ranks cannot be had at all."""
    peer = check.source.read.peer
    if peer.hello is None or FEATURE not in peer.hello.features:
        detail = f"engine {peer.engine_id} runs a kvplan that does not answer questions for digests"
        return Failure("verify_unsupported", detail)
    for share, name in ((check.here, rank_name(me)), (check.there, check.name)):
        try:
            check_host_memory(share)
        except UnsupportedError as error:
            return Failure("verify_unsupported", f"{name}: {error}")
    return None
