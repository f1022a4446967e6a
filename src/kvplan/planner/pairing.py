"""Pairings: two engine layouts joined by (layer, component), with everything that equal layouts share done once.

This file holds the caches of one planning job; they live and die with it. Layout arithmetic is in ``meeting``,
``rows`` and ``proof``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvplan.errors import FormatMismatchError, MissingLayerError, PlanError, UncoveredError
from kvplan.planner.election import Election, assign
from kvplan.planner.meeting import Meeting, meet
from kvplan.planner.proof import prove
from kvplan.planner.rows import Cells, Rows, concatenate, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.planner.layout import BlockLayout, ComponentLayout, EngineLayout, Region

    Key = tuple[str, str]


class Share(NamedTuple):
    """What one source rank gives of one component to one destination rank."""

    kind: int
    """Equal for shares with equal cells and rows."""
    source_rank: int
    source: ComponentLayout
    destination: ComponentLayout
    meeting: Meeting
    cells: tuple[Cells, ...]
    rows: tuple[Rows, ...]
    """One per cells, without the components' base offsets."""


class Pairing:
    """Two engine layouts joined; meetings, elections and proofs of equal layouts are computed once."""

    def __init__(self, source: EngineLayout, destination: EngineLayout) -> None:
        """Join the two layouts; raises MissingLayerError when a layer that must move is on one side only."""
        self.source = source
        self.destination = destination
        self._held = _by_key(source)
        self.not_moved = _check_layers(source, destination)
        self._kinds: dict[object, int] = {}
        self._kind_of_id: dict[int, int] = {}
        self._signatures = {key: self._signature(held) for key, held in self._held.items()}
        self._meetings: dict[tuple[int, tuple[tuple[int, int], ...]], Meeting] = {}
        self._shares: dict[tuple[int, tuple[int, ...]], dict[int, tuple[int, tuple[Cells, ...], tuple[Rows, ...]]]] = {}
        self._num_shares = 0

    def elect(self, *, salt: int) -> Election:
        """Return the election over all components of all destination ranks."""
        tasks = {
            (rank, mask)
            for rank, layout in enumerate(self.destination.ranks)
            for item in layout.components
            if item.key in self._held
            for _, mask in self._meeting(item).classes
        }
        return assign(
            tasks, num_sources=len(self.source.ranks), num_destinations=len(self.destination.ranks), salt=salt
        )

    def shares(self, destination_rank: int, election: Election) -> Iterator[Share]:
        """Yield what each elected source rank gives of each component of one destination rank, proved."""
        chosen = election.chosen()
        for item in self.destination.ranks[destination_rank].components:
            if item.key not in self._held:
                continue
            meeting = self._meeting(item)
            try:
                elected = tuple(chosen[destination_rank, mask] for _, mask in meeting.classes)
            except KeyError:
                raise PlanError(f"the election does not know destination rank {destination_rank}") from None
            for rank, (kind, cells, rows) in self._shared(meeting, elected, item).items():
                yield Share(kind, rank, self._held[item.key][rank], item, meeting, cells, rows)

    def regions(self, share: Share, destination_rank: int) -> tuple[Region, Region]:
        """Return the regions of a share, source and destination."""
        return (
            self.source.ranks[share.source_rank].regions[share.source.region],
            self.destination.ranks[destination_rank].regions[share.destination.region],
        )

    def _kind(self, block: BlockLayout) -> int:
        known = self._kind_of_id.get(id(block))
        if known is None:
            content = (block.axes, block.atom_bytes, block.format, block.tokens_per_block)
            known = self._kinds.setdefault(content, len(self._kinds))
            self._kind_of_id[id(block)] = known
        return known

    def _signature(self, held: dict[int, ComponentLayout]) -> tuple[tuple[int, int], ...]:
        return tuple((rank, self._kind(item.block)) for rank, item in held.items())

    def _meeting(self, item: ComponentLayout) -> Meeting:
        key = (self._kind(item.block), self._signatures[item.key])
        known = self._meetings.get(key)
        if known is None:
            sources = {rank: held.block for rank, held in self._held[item.key].items()}
            try:
                known = meet(item.block, sources)
            except (UncoveredError, FormatMismatchError) as error:
                raise _named(error, item) from None
            self._meetings[key] = known
        return known

    def _shared(
        self, meeting: Meeting, elected: tuple[int, ...], item: ComponentLayout
    ) -> dict[int, tuple[int, tuple[Cells, ...], tuple[Rows, ...]]]:
        key = (id(meeting), elected)
        known = self._shares.get(key)
        if known is None:
            known = {}
            for rank in sorted(set(elected)):
                labels = [own for (own, _), source in zip(meeting.classes, elected, strict=True) if source == rank]
                cells = tuple(meeting.cells(rank, labels))
                self._num_shares += 1
                known[rank] = (self._num_shares, cells, tuple(map(rows_of, cells)))
            self._prove(meeting, elected, {rank: concatenate(rows) for rank, (_, _, rows) in known.items()}, item)
            self._shares[key] = known
        return known

    @staticmethod
    def _prove(meeting: Meeting, elected: tuple[int, ...], rows: dict[int, Rows], item: ComponentLayout) -> None:
        try:
            prove(meeting, dict(zip((own for own, _ in meeting.classes), elected, strict=True)), rows)
        except PlanError as error:
            raise PlanError(f"layer {item.layer!r} component {item.component!r}: {error}") from None


def _by_key(engine: EngineLayout) -> dict[Key, dict[int, ComponentLayout]]:
    held: dict[Key, dict[int, ComponentLayout]] = {}
    for rank, layout in enumerate(engine.ranks):
        for item in layout.components:
            held.setdefault(item.key, {})[rank] = item
    return held


def _check_layers(source: EngineLayout, destination: EngineLayout) -> tuple[Key, ...]:
    """Return the optional components that one side lacks; refuse the others."""
    sides = [
        {item.key: item.optional for rank in engine.ranks for item in rank.components}
        for engine in (source, destination)
    ]
    lacking = [(key, optional, i) for i in (0, 1) for key, optional in sides[i].items() if key not in sides[1 - i]]
    for (layer, component), optional, i in lacking:
        if not optional:
            has, misses = ("source", "destination") if i == 0 else ("destination", "source")
            raise MissingLayerError(
                f"layer {layer!r} component {component!r} is at the {has} and not at the {misses}; "
                "both engines must serve the same model",
                layer=layer,
                component=component,
            )
    return tuple(key for key, _, _ in lacking)


def _named(error: UncoveredError | FormatMismatchError, item: ComponentLayout) -> PlanError:
    text = f"layer {item.layer!r} component {item.component!r}: {error}"
    if isinstance(error, UncoveredError):
        return UncoveredError(
            text, layer=item.layer, component=item.component, axis=error.axis, interval=error.interval
        )
    return FormatMismatchError(
        text, layer=item.layer, component=item.component, source=error.source, destination=error.destination
    )
