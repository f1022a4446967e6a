"""Cards of the picture: one rank's name, what it holds, and a row for each rank it exchanges with. No canvas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.cli.flows import SPLIT_AXES, union
from kvplan.cli.summary_table import AXIS_WORDS, held_text, ranges_text, rank_name, size, tokens_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.cli.flows import Flow, Ranges
    from kvplan.planner import EngineLayout, RankLayout

HEADER, BAR, ROW, PAD = 30, 20, 20, 8
"""Heights, in pixels."""
BAR_WIDTH = 190
BAR_COLOURS = {"KV heads": "#2f6db3", "state heads": "#b5651d", "channels": "#b5651d", "layers": "#5b6770"}


@dataclass(frozen=True, slots=True)
class Bar:
    """Which part of something a rank holds."""

    label: str
    text: str
    colour: str
    segments: tuple[tuple[float, float], ...]
    """(x, width) of each part held, of ``BAR_WIDTH``."""
    ticks: tuple[float, ...]
    y: float


@dataclass(frozen=True, slots=True)
class Row:
    """One flow, as its card tells it."""

    text: str
    note: str
    colour: str
    peer: int
    y: float


@dataclass(slots=True)
class Card:
    """One rank on the canvas; its place is set when its column is spread."""

    name: str
    note: str
    bars: tuple[Bar, ...]
    rows: tuple[Row, ...]
    height: float
    colour: str
    idle: bool
    x: float = 0.0
    y: float = 0.0

    def row_y(self, peer: int) -> float:
        """Return the height on the canvas at which the flow with a peer rank starts or ends."""
        return self.y + next(row.y for row in self.rows if row.peer == peer) + ROW / 2


def cards(engine: EngineLayout, found: Sequence[Flow], letter: str, colours: Sequence[str]) -> list[Card]:
    """Return the cards of one side, in rank order."""
    extents = _extents(engine)
    layers = list(dict.fromkeys(item.layer for rank in engine.ranks for item in rank.components))
    staged = any(rank.pp for rank in engine.ranks)
    result = []
    for number, rank in enumerate(engine.ranks):
        own = [flow for flow in found if number == (flow.source_rank if letter == "P" else flow.destination_rank)]
        bars = [bar for axis, total in extents.items() for bar in _axis_bars(rank, axis, total)]
        if staged:
            places = {layer: i for i, layer in enumerate(layers)}
            held = union([(places[item.layer], places[item.layer] + 1) for item in rank.components])
            bars.append(("layers", held, (0, len(layers))))
        result.append(_card(engine, number, own, bars, letter, colours))
    return result


def _card(
    engine: EngineLayout,
    number: int,
    own: list[Flow],
    held: list[tuple[str, Ranges, tuple[int, int]]],
    letter: str,
    colours: Sequence[str],
) -> Card:
    y = float(HEADER)
    bars = []
    for label, ranges, total in held:
        bars.append(_bar(label, ranges, total, y))
        y += BAR
    y += PAD if bars else 0
    rows = []
    for flow in own:
        peer = flow.destination_rank if letter == "P" else flow.source_rank
        rows.append(_row(flow, peer, letter, colours[flow.source_rank], y))
        y += ROW
    verb = "sends" if letter == "P" else "receives"
    idle = "not read: released at once" if letter == "P" else "reads nothing"
    note = f"{verb} {size(sum(flow.num_bytes for flow in own))}" if own else idle
    colour = colours[number] if letter == "P" else "#44505a"
    return Card(rank_name(letter, number, engine), note, tuple(bars), tuple(rows), y + PAD, colour, not own)


def _row(flow: Flow, peer: int, letter: str, colour: str, y: float) -> Row:
    moved = held_text(flow.held) or f"rows of {tokens_text(flow.shares)} tokens"
    count = f"{flow.num_descriptors:,}"
    path = f"{count} desc. staged as {flow.read_descriptors:,}" if flow.staged else f"{count} descriptors"
    if letter == "P":
        return Row(f"to D{peer}: {moved}", size(flow.num_bytes), colour, peer, y)
    return Row(f"from P{peer}: {size(flow.num_bytes)}", path, colour, peer, y)


def _bar(label: str, ranges: Ranges, total: tuple[int, int], y: float) -> Bar:
    low, high = total
    scale = BAR_WIDTH / max(1, high - low)
    segments = tuple((round((a - low) * scale, 2), round((b - a) * scale, 2)) for a, b in ranges)
    ticks = tuple(round(i * scale, 2) for i in range(1, high - low)) if high - low <= 64 else ()
    text = f"{ranges_text(ranges)} of {high - low}"
    return Bar(label, text, BAR_COLOURS.get(label, "#5b6770"), segments, ticks, y)


def _axis_bars(rank: RankLayout, axis: str, total: tuple[int, int]) -> list[tuple[str, Ranges, tuple[int, int]]]:
    spans = [
        (span.start, span.stop)
        for item in rank.components
        if _shown(item.component, axis)
        for own in item.block.axes
        if own.name == axis
        for span in own.spans
    ]
    return [(AXIS_WORDS[axis], union(spans), total)] if spans else []


def _extents(engine: EngineLayout) -> dict[str, tuple[int, int]]:
    """Return how far each axis that is worth a bar reaches over all ranks."""
    found: dict[str, tuple[int, int]] = {}
    for rank in engine.ranks:
        for item in rank.components:
            for axis in item.block.axes:
                if axis.name in SPLIT_AXES and _shown(item.component, axis.name):
                    low, high = found.get(axis.name, (axis.spans[0].start, axis.spans[-1].stop))
                    found[axis.name] = (min(low, axis.spans[0].start), max(high, axis.spans[-1].stop))
    return {axis: found[axis] for axis in SPLIT_AXES if axis in found}


def _shown(component: str, axis: str) -> bool:
    """Channels of convolutions follow the heads; only Mamba1's state is split by channel alone."""
    return axis != "channel" or component == "ssm"
