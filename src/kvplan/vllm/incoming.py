"""Requests on the decode side: what is known of their handoffs, and how far they are. No vLLM objects, no block tables.

States and what moves a request on::

    NEW ---- blocks allocated for external tokens ---> LOADING --- worker reports it ---> DONE
     |                                                    |
     +-- nothing to load, aborted, read by a sibling --> DONE (the reference is released)

A request that is DONE is an ordinary local request: after a failed load, a preemption or a full local hit the engine
computes what is missing itself.

Requests that share a handoff (n > 1) are a family: one of them reads, the others wait for it and then find its tokens
in the local prefix cache; the reference is released when none of them reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvplan.errors import IllegalTransitionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.vllm.params import Handoff

    Key = tuple[str, str, str]


class Stage(Enum):
    """How far a request on the decode side is."""

    NEW = "new"
    LOADING = "loading"
    DONE = "done"


_MOVES = {(Stage.NEW, Stage.LOADING), (Stage.NEW, Stage.DONE), (Stage.LOADING, Stage.DONE)}


@dataclass(slots=True)
class Incoming:
    """A request whose prompt was computed by another engine."""

    request_id: str
    handoff: Handoff | None
    """None when the parameters could not be used."""
    problem: str = ""
    """Why its cache cannot be loaded; empty as long as it can."""
    stage: Stage = Stage.NEW
    num_tokens: int = 0
    """Tokens that local and external cache hold together, as promised to the scheduler."""
    num_external: int = 0
    """Tokens to load, as promised to the scheduler."""
    half_filled: set[int] = field(default_factory=set)
    """Blocks of window groups whose first tokens the producer no longer had: never to be reused by another request."""

    def advance(self, stage: Stage) -> None:
        """Move to another stage; illegal moves raise ``IllegalTransitionError``."""
        if (self.stage, stage) not in _MOVES:
            raise IllegalTransitionError(f"request {self.request_id}: {self.stage.value} does not become {stage.value}")
        self.stage = stage


class Incomings:
    """All requests on the decode side that have not ended, by id and by family."""

    def __init__(self) -> None:
        self._items: dict[str, Incoming] = {}
        self._families: dict[Key, set[str]] = {}
        self._readers: dict[Key, str] = {}

    def __iter__(self) -> Iterator[Incoming]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Incoming) -> None:
        """Take a request in."""
        self._items[item.request_id] = item
        if item.handoff is not None:
            self._families.setdefault(item.handoff.remote.key, set()).add(item.request_id)

    def get(self, request_id: str) -> Incoming | None:
        """Return a request, or None."""
        return self._items.get(request_id)

    def drop(self, request_id: str) -> Incoming | None:
        """Forget a request that has ended, and return it."""
        item = self._items.pop(request_id, None)
        if item is not None and item.handoff is not None:
            key = item.handoff.remote.key
            family = self._families[key]
            family.discard(request_id)
            if not family:
                del self._families[key]
                self._readers.pop(key, None)
        return item

    def set_reader(self, item: Incoming) -> None:
        """Note that this request reads for its family."""
        if item.handoff is not None:
            self._readers[item.handoff.remote.key] = item.request_id

    def read_by_sibling(self, item: Incoming) -> bool:
        """Return whether another request of the family reads, or has read, the handoff."""
        reader = None if item.handoff is None else self._readers.get(item.handoff.remote.key)
        return reader is not None and reader != item.request_id

    def sibling_loads(self, item: Incoming) -> bool:
        """Return whether that other request is still loading."""
        reader = None if item.handoff is None else self._items.get(self._readers.get(item.handoff.remote.key, ""))
        return reader is not None and reader is not item and reader.stage is Stage.LOADING

    def is_last(self, item: Incoming) -> bool:
        """Return whether no other request of the family may still read."""
        if item.handoff is None or self.read_by_sibling(item):
            return False
        family = self._families.get(item.handoff.remote.key, set())
        return all(self._items[other].stage is Stage.DONE for other in family if other != item.request_id)
