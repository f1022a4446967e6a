"""The producer's side of verification: digests for whoever holds a claim. Decides about no claim, compares nothing.

1. A question is taken only while its claim is granted and live; the bytes are looked at by a worker.
2. When the digests are there, the claim must still be live. An offer that has ended never becomes live again, so the
   bytes were the offered ones the whole time.
3. The plan of a pair of ranks is made once for the life of a reading engine, as the reader makes it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from kvplan.errors import BindError, KVPlanError, SessionError, UnsupportedError
from kvplan.planner import BlockTable, bind, plan_rank
from kvplan.session.digest import Scope, Share, check_host_memory, digests
from kvplan.session.offers import OfferKey, Owner
from kvplan.wire.digests import ComponentDigest, Digested, DigestRefused

if TYPE_CHECKING:
    from kvplan.planner import Election, EngineLayout, PairPlan
    from kvplan.session.config import Identity, SessionConfig
    from kvplan.session.nouns import Offer
    from kvplan.session.offers import OfferBook
    from kvplan.session.stats import Stats
    from kvplan.session.worker import Hands
    from kvplan.wire.digests import Digest

logger = logging.getLogger(__name__)


class Reply(NamedTuple):
    """An answer and where it goes."""

    route: bytes
    message: Digested | DigestRefused


@dataclass(slots=True, eq=False)
class _Reader:
    """One reading engine."""

    own: EngineLayout
    layout: EngineLayout
    election: Election
    plans: dict[int, PairPlan] = field(default_factory=dict)
    """By its ranks; the worker fills it."""

    def plan(self, source_rank: int, rank: int) -> PairPlan:
        """Return what one of its ranks reads from one of ours."""
        known = self.plans.get(rank)
        if known is None:
            if not 0 <= rank < len(self.layout.ranks):
                raise BindError(f"rank {rank} is not one of {len(self.layout.ranks)}")
            plans = plan_rank(self.own, self.layout, rank, election=self.election)
            known = next((plan for plan in plans if plan.source_rank == source_rank), None)
            if known is None:
                raise BindError(f"rank {rank} reads nothing from rank {source_rank}")
            self.plans[rank] = known
        return known


class DigestDesk:
    """Questions for digests, and the readers that may ask them."""

    def __init__(
        self, *, identity: Identity, config: SessionConfig, offers: OfferBook, stats: Stats, hands: Hands
    ) -> None:
        self._rank = identity.rank
        self._max_readers = config.max_peers
        self._offers = offers
        self._stats = stats
        self._hands = hands
        self._readers: OrderedDict[str, _Reader] = OrderedDict()
        self._open: set[tuple[str, int, int]] = set()
        self._finished: deque[tuple[bytes, Digest, Digested | DigestRefused]] = deque()

    def know(self, own: EngineLayout, layout: EngineLayout, election: Election) -> None:
        """Take an engine that has introduced itself; the plans of one that is known stay."""
        held = self._readers.get(layout.engine_id)
        if held is None or held.layout != layout or held.own != own:
            self._readers[layout.engine_id] = _Reader(own, layout, election)
        self._readers.move_to_end(layout.engine_id)
        while len(self._readers) > self._max_readers:
            self._readers.popitem(last=False)

    def ask(self, route: bytes, question: Digest) -> list[Reply]:
        """Take a question; return the answer if it is no. One that is being worked on already is not taken again."""
        name = (question.engine_id, question.rank, question.number)
        if name in self._open:
            return []
        reader, offer = self._readers.get(question.engine_id), self._claimed(question)
        if reader is None:
            return [Reply(route, _refused(question, "not_introduced"))]
        if offer is None:
            return [Reply(route, _refused(question, "not_claimed", "there is no live claim of this reader"))]
        self._open.add(name)
        if not self._hands.submit(lambda: self._work(route, question, reader, offer)):
            self._open.discard(name)
            return [Reply(route, _refused(question, "overloaded"))]
        return []

    def replies(self) -> list[Reply]:
        """Return the answers that are ready."""
        replies = []
        while self._finished:
            route, question, answer = self._finished.popleft()
            self._open.discard((question.engine_id, question.rank, question.number))
            if self._claimed(question) is None:
                answer = _refused(question, "not_claimed", "the claim ended before the digests were there")
            self._stats.add("digests_answered", isinstance(answer, Digested))
            replies.append(Reply(route, answer))
        return replies

    def _claimed(self, question: Digest) -> Offer | None:
        """Return the offer that a question is about, while its reader holds it."""
        entry = self._offers.live().get(OfferKey(question.request_id, question.generation))
        if entry is None or entry.owner != Owner(question.engine_id, question.ticket):
            return None
        return entry.offer if question.rank in entry.claimed else None

    def _work(self, route: bytes, question: Digest, reader: _Reader, offer: Offer) -> None:
        """Answer a question, in the worker's thread."""
        begun = perf_counter()
        try:
            answer = self._answer(question, reader, offer)
        except UnsupportedError as error:
            answer = _refused(question, "unsupported", str(error))
        except (KVPlanError, MemoryError) as error:
            answer = _refused(question, "failed", f"{type(error).__name__}: {error}")
        except Exception as error:  # whatever it is must reach the reader, which waits
            logger.exception("the digests of request %s could not be computed", question.request_id)
            self._stats.add("loop_errors")
            answer = _refused(question, "failed", f"{type(error).__name__}: {error}")
        self._stats.observe("digest_seconds", perf_counter() - begun)
        self._finished.append((route, question, answer))
        self._hands.wake()

    def _answer(self, question: Digest, reader: _Reader, offer: Offer) -> Digested | DigestRefused:
        if not offer.tables:
            raise SessionError("the offer carries no block tables")
        plan = reader.plan(self._rank, question.rank)
        there = tuple(BlockTable(table.first_token, table.block_ids) for table in question.tables)
        share = Share(plan, "source", offer.tables, there, offer.num_tokens)
        check_host_memory(share)
        # Nothing of what it returns is used: it refuses tables that leave the regions, before anything is read.
        bind(plan, offer.tables, there, num_tokens=offer.num_tokens, whole_blocks=True, require_cover=False)
        found = digests(share, Scope(*_scope(question)), is_wanted=self._hands.is_open)
        return Digested(
            engine_id=question.engine_id,
            rank=question.rank,
            number=question.number,
            components=tuple(ComponentDigest(*key, value) for key, value in found.components.items()),
            parts=found.parts,
            total=found.total,
        )


def _scope(question: Digest) -> tuple[str, str, int | None, int, int | None]:
    scope = question.scope
    return (scope.layer, scope.component, scope.strand, scope.first, scope.stop)


def _refused(question: Digest, reason: str, detail: str = "") -> DigestRefused:
    return DigestRefused(
        engine_id=question.engine_id, rank=question.rank, number=question.number, reason=reason, detail=detail[:4000]
    )
