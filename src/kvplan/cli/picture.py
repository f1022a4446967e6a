"""The picture of ``kvplan explain``: places on a canvas, handed to templates. What shapes look like is in templates.

Source ranks stand on the left, destination ranks on the right, one card each; a ribbon is one pair of ranks, as wide as
its bytes and in the colour of its source rank. Bars show which heads, and under pipeline parallelism which layers, a
rank holds.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvplan.cli.cards import HEADER, ROW, Card, cards
from kvplan.cli.flows import predicted_seconds
from kvplan.cli.summary_table import closing_lines, duration, group_rows, held_text, rank_name, size, tokens_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.cli.engine_file import Target
    from kvplan.cli.flows import Cost, Flow
    from kvplan.planner import EnginePlan

WIDTH, MARGIN, CARD_WIDTH, TOP, GAP = 1240, 24, 430, 118, 14
WIDEST, THINNEST = 12.0, 1.5
"""Widths of ribbons: the largest flow's, and the least that can be seen."""


@dataclass(frozen=True, slots=True)
class Ribbon:
    """One flow between two cards."""

    path: str
    colour: str
    width: float
    dashed: bool
    title: str


def draw(
    source: Target, destination: Target, plan: EnginePlan, found: Sequence[Flow], cost: Cost, num_tokens: int
) -> str:
    """Return the picture as SVG text."""
    colours = palette(len(plan.source.ranks))
    left = cards(plan.source, found, "P", colours)
    right = cards(plan.destination, found, "D", colours)
    height = max(_stacked(left), _stacked(right))
    _spread(left, MARGIN, height)
    _spread(right, WIDTH - MARGIN - CARD_WIDTH, height)
    groups = group_rows(found)
    bottom = TOP + height + 44
    return (
        _environment()
        .get_template("flows.svg.j2")
        .render(
            width=WIDTH,
            height=bottom + 40 + 20 * len(groups) + 52,
            card_width=CARD_WIDTH,
            header=HEADER,
            row_height=ROW,
            left=left,
            right=right,
            ribbons=_ribbons(found, left, right, colours, cost),
            groups=groups,
            bottom=bottom,
            source=_heading(source),
            destination=_heading(destination),
            facts=_facts(found, cost, num_tokens),
            any_staged=any(flow.staged for flow in found),
        )
    )


def page(svg: str, found: Sequence[Flow], plan: EnginePlan, cost: Cost, num_tokens: int) -> str:
    """Return an HTML page that holds the picture, the table of pairs and the closing sentences."""
    rows = [
        {
            "from": rank_name("P", flow.source_rank, plan.source),
            "to": rank_name("D", flow.destination_rank, plan.destination),
            "heads": held_text(flow.held) or "all (one row a token)",
            "layers": len(flow.layers),
            "tokens": tokens_text(flow.shares),
            "bytes": size(flow.num_bytes),
            "descriptors": f"{flow.num_descriptors:,}",
            "runs": f"{flow.smallest_run:,} / {flow.median_run:,} B",
            "path": f"staged, {flow.read_descriptors:,} reads" if flow.staged else "direct",
            "time": duration(cost.seconds(flow.read_bytes, flow.read_descriptors)),
        }
        for flow in found
    ]
    return _environment().get_template("page.html.j2").render(
        svg=svg, rows=rows, lines=list(closing_lines(found, plan, cost, num_tokens)), source=plan.source.engine_id,
        destination=plan.destination.engine_id,
    )  # fmt: skip


def palette(count: int) -> list[str]:
    """Return distinct colours, neighbours far apart in hue.

    >>> palette(2)
    ['#2d70be', '#be7a2d']
    """
    step = next((step for step in (5, 7, 3) if count % step and count > step), 1)
    hues = [(212 / 360 + i * step % count / count) % 1 for i in range(count)]
    levels = [0.46 if count < 9 or i % 2 == 0 else 0.36 for i in range(count)]
    return [_hex(colorsys.hls_to_rgb(hue, level, 0.62)) for hue, level in zip(hues, levels, strict=True)]


def _hex(colour: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("kvplan.cli", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _stacked(column: list[Card]) -> float:
    return sum(card.height for card in column) + GAP * (len(column) - 1)


def _spread(column: list[Card], x: float, height: float) -> None:
    """Place the cards of one column below one another, the room that is left shared out between them."""
    spare = height - _stacked(column)
    between = spare / (len(column) + 1)
    y = TOP + between
    for card in column:
        card.x, card.y = x, round(y, 1)
        y += card.height + GAP + between


def _ribbons(
    found: Sequence[Flow], left: list[Card], right: list[Card], colours: list[str], cost: Cost
) -> list[Ribbon]:
    most = max((flow.num_bytes for flow in found), default=1) or 1
    ribbons = []
    for flow in found:
        start, end = left[flow.source_rank], right[flow.destination_rank]
        y0, y1 = start.row_y(flow.destination_rank), end.row_y(flow.source_rank)
        x0, x1 = start.x + CARD_WIDTH, end.x
        bend = (x1 - x0) * 0.5
        title = (
            f"{start.name} to {end.name}: {size(flow.num_bytes)} in {flow.num_descriptors:,} descriptors, "
            f"{'staged' if flow.staged else 'direct'}, {duration(cost.seconds(flow.read_bytes, flow.read_descriptors))}"
        )
        ribbons.append(
            Ribbon(
                path=f"M{x0:g},{y0:g} C{x0 + bend:g},{y0:g} {x1 - bend:g},{y1:g} {x1:g},{y1:g}",
                colour=colours[flow.source_rank],
                width=round(max(THINNEST, WIDEST * flow.num_bytes / most), 2),
                dashed=flow.staged,
                title=title,
            )
        )
    return ribbons


def _heading(target: Target) -> dict[str, str]:
    ranks = target.layout.ranks
    tp, pp, dcp = (max(getattr(rank, name) for rank in ranks) + 1 for name in ("tp", "pp", "dcp"))
    words = [f"TP {tp}", *([f"PP {pp}"] if pp > 1 else []), *([f"DCP {dcp}"] if dcp > 1 else [])]
    blocks = sorted({item.block.tokens_per_block or 0 for rank in ranks for item in rank.components} - {0})
    if blocks:
        words.append(f"blocks of {' / '.join(map(str, blocks))} tokens")
    axes = {axis.name for rank in ranks for item in rank.components for axis in item.block.axes}
    if target.spec is not None and "kv_head" in axes:
        words.append(f"{target.spec.cache.kv_layout} {target.spec.cache.kv_packing.replace('_', ' ')}")
    if target.spec is not None and "width" in axes:
        words.append(f"convolution {target.spec.cache.conv_layout}")
    name = target.layout.engine_id
    model = target.spec.model if target.spec is not None else ""
    return {"name": name, "words": ", ".join(words), "model": model}


def _facts(found: Sequence[Flow], cost: Cost, num_tokens: int) -> str:
    total, count = sum(flow.num_bytes for flow in found), sum(flow.num_descriptors for flow in found)
    return (
        f"{num_tokens:,} tokens: {size(total)} in {count:,} descriptors, {duration(predicted_seconds(found, cost))} "
        f"at {cost.bandwidth_gbps:g} GB/s a rank and {cost.descriptor_us:g} us a descriptor"
    )
