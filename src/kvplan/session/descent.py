"""Descent: from two sides' digests that differ to the first wrong coordinate. No bytes, no messages, no times.

1. Everything, by component: the first component that differs, in the order of the declarations.
2. Its strands, divided into parts: the first part that differs, divided again, until it is one strand.
3. That strand's tokens: likewise, until it is one.

Each step is one question to both sides. With parts of 256, a strand of 60,000 tokens is searched in two of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvplan.session.digest import Scope, bounds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.session.digest import Digests


class Found(NamedTuple):
    """The first wrong atom."""

    layer: str
    component: str
    strand: int
    token: int
    """Its index among the tokens of the strand."""


@dataclass(slots=True)
class Descent:
    """Where a search is."""

    order: Mapping[tuple[str, str], int]
    """Place of each (layer, component) in the declarations."""
    scope: Scope = field(default_factory=Scope)
    """What both sides are to be asked next."""
    is_over: bool = False
    differing: int = 0
    """Components that differ; 0 as long as none is known to."""
    components: int = 0
    found: Found | None = None
    note: str = ""
    """Why the search ended without a coordinate."""

    def take(self, ours: Digests, theirs: Digests) -> None:
        """Take both sides' answers to the scope."""
        if self.scope.is_everything:
            self._choose_component(ours, theirs)
        elif ours.total != theirs.total or len(ours.parts) != len(theirs.parts):
            self._end(f"{ours.total} coordinates were moved as seen from here, {theirs.total} as seen from there")
        else:
            self._narrow(ours, theirs)

    def _choose_component(self, ours: Digests, theirs: Digests) -> None:
        a, b = ours.components, theirs.components
        differ = sorted((key for key in a.keys() | b.keys() if a.get(key) != b.get(key)), key=self._place)
        self.components, self.differing = len(a.keys() | b.keys()), len(differ)
        if not differ:
            self.is_over = True
            return
        self.scope = Scope(*differ[0])
        if differ[0] not in a or differ[0] not in b:
            self._end(f"it was moved as seen from {'here' if differ[0] in a else 'there'} only")

    def _place(self, key: tuple[str, str]) -> tuple[int, tuple[str, str]]:
        return (self.order.get(key, len(self.order)), key)

    def _narrow(self, ours: Digests, theirs: Digests) -> None:
        scope = self.scope
        bad = next((i for i, (a, b) in enumerate(zip(ours.parts, theirs.parts, strict=True)) if a != b), None)
        if bad is None:
            self._end("the digests differed and then agreed: the memory of one side is being written")
            return
        first, stop = bounds(scope.first, ours.total if scope.stop is None else scope.stop)[bad : bad + 2]
        if stop - first > 1:
            self.scope = scope._replace(first=first, stop=stop)
        elif scope.strand is None:
            self.scope = Scope(scope.layer, scope.component, first)
        else:
            self.found = Found(scope.layer, scope.component, scope.strand, first)
            self.is_over = True

    def _end(self, note: str) -> None:
        self.note = note
        self.is_over = True
