"""Engine layouts to their compact wire form and back. No messages, no comparison.

1. Encoding puts names, axes and block layouts into tables; a component is a row of indices. 64 equal layers
   on 8 ranks cost one block layout and 512 short rows.
2. Decoding looks up every index, rebuilds the nouns and lets *them* validate: a peer's layout that exists is as
   sound as our own. Before that, the work that validation may cause is bounded.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, TypeVar

from kvplan.errors import LayoutError, LimitError, WireError
from kvplan.planner import Axis, BlockLayout, ComponentLayout, EngineLayout, RankLayout, Region, Span
from kvplan.wire.messages import AxisBody, BlockBody, ComponentBody, LayoutBody, RankBody, RegionBody, SpanBody

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

T = TypeVar("T")

MAX_BLOCK_COORDINATES = 1 << 24
"""Most coordinates of one component in one block: 4,096 tokens of 16 heads of 256 elements, each its own."""
MAX_COMPONENTS = 1 << 20
"""Most components of all ranks together."""


class _Table(dict["Hashable", int]):
    """Gives each distinct value the next index."""

    def index(self, value: Hashable) -> int:
        return self.setdefault(value, len(self))


def to_body(layout: EngineLayout) -> LayoutBody:
    """Return the wire form of an engine layout."""
    layers, components, axes, blocks = _Table(), _Table(), _Table(), _Table()
    ranks = []
    for rank in layout.ranks:
        rows = tuple(
            ComponentBody(
                layers.index(item.layer),
                components.index(item.component),
                item.group,
                item.region,
                blocks.index(_block_body(item.block, axes)),
                item.block.base_bytes,
                item.optional,
            )
            for item in rank.components
        )
        regions = tuple(RegionBody(r.base, r.num_blocks, r.block_stride_bytes, r.device) for r in rank.regions)
        ranks.append(RankBody(rank.tp, rank.pp, rank.dcp, regions, rows))
    return LayoutBody(
        layers=tuple(layers),  # type: ignore[arg-type]  # keys are what was put in
        components=tuple(components),  # type: ignore[arg-type]
        axes=tuple(axes),  # type: ignore[arg-type]
        blocks=tuple(blocks),  # type: ignore[arg-type]
        ranks=tuple(ranks),
    )


def from_body(engine_id: str, body: LayoutBody) -> EngineLayout:
    """Return the engine layout in a wire form; raises ``WireError`` for one that is not sound."""
    if sum(len(rank.components) for rank in body.ranks) > MAX_COMPONENTS:
        raise LimitError(f"engine {engine_id!r} declares more than {MAX_COMPONENTS} components")
    try:
        axes = [Axis(axis.name, tuple(_span(span) for span in axis.spans)) for axis in body.axes]
        for block in body.blocks:
            _check_size(block, axes)
        reader = _Reader(body, axes)
        return EngineLayout(engine_id, tuple(reader.rank(rank) for rank in body.ranks))
    except LayoutError as error:
        raise WireError(f"engine {engine_id!r} sent a layout that contradicts itself: {error}") from error


class _Reader:
    """Looks up indices; equal block layouts become one object, so that they are validated once."""

    def __init__(self, body: LayoutBody, axes: list[Axis]) -> None:
        self._body = body
        self._axes = axes
        self._blocks: dict[tuple[int, int], BlockLayout] = {}

    def rank(self, rank: RankBody) -> RankLayout:
        regions = tuple(Region(r.base, r.num_blocks, r.block_stride_bytes, r.device) for r in rank.regions)
        return RankLayout(regions, tuple(map(self._component, rank.components)), rank.tp, rank.pp, rank.dcp)

    def _component(self, row: ComponentBody) -> ComponentLayout:
        return ComponentLayout(
            _at("layer", self._body.layers, row.layer),
            _at("component", self._body.components, row.component),
            row.group,
            row.region,
            self._block(row.block, row.base_bytes),
            row.optional,
        )

    def _block(self, index: int, base_bytes: int) -> BlockLayout:
        held = self._blocks.get((index, base_bytes))
        if held is None:
            body = _at("block", self._body.blocks, index)
            axes = tuple(_at("axis", self._axes, axis) for axis in body.axes)
            held = BlockLayout(axes, body.atom_bytes, body.format, base_bytes, body.tokens_per_block)
            self._blocks[index, base_bytes] = held
        return held


def _block_body(block: BlockLayout, axes: _Table) -> BlockBody:
    indices = tuple(axes.index(_axis_body(axis)) for axis in block.axes)
    return BlockBody(indices, block.atom_bytes, block.format, block.tokens_per_block)


def _axis_body(axis: Axis) -> AxisBody:
    return AxisBody(
        axis.name, tuple(SpanBody(s.start, s.stop, s.offset_bytes, s.stride_bytes, s.slot) for s in axis.spans)
    )


def _span(span: SpanBody) -> Span:
    return Span(span.start, span.stop, span.offset_bytes, span.stride_bytes, span.slot)


def _check_size(block: BlockBody, axes: list[Axis]) -> None:
    count = prod(len(_at("axis", axes, index)) for index in block.axes)
    if count > MAX_BLOCK_COORDINATES:
        raise LimitError(f"a block layout has {count} coordinates; the limit is {MAX_BLOCK_COORDINATES}")


def _at(what: str, table: Sequence[T], index: int) -> T:
    if index >= len(table):
        raise WireError(f"{what} index {index} is not in [0, {len(table)})")
    return table[index]
