"""Hypothesis strategies for layouts, engines and requests. Shipped, so that users can test declarations of their own.

The shapes are built from axes alone (no model words): a token axis cut into blocks and kernel blocks, a partitioned
axis that a parallel size splits or replicates, and an innermost axis of elements that is an atom or an axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import strategies as st

from kvplan.planner import Axis, BlockLayout, BlockTable, ComponentLayout, EngineLayout, RankLayout, Region, Span

ELEMENTS = 4
"""Elements of the innermost axis: few, so that the oracle is quick."""
ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """How one side stores one partitioned component pair (k, v)."""

    parallel: int
    block_size: int
    kernel_block_size: int
    order: str
    """Order of axes from the outermost: HND, NHD, or TRANSPOSED (k as [elements, tokens])."""
    packing: str
    """split (a region each), packed (k then v in each kernel block), interleaved (k and v side by side)."""


def held(total: int, parallel: int, rank: int) -> tuple[int, int]:
    """Return the half-open interval that a rank holds of an axis: split, or replicated where too few.

    >>> [held(2, 4, r) for r in range(4)], [held(4, 3, r) for r in range(3)]
    ([(0, 1), (0, 1), (1, 2), (1, 2)], [(0, 2), (1, 3), (2, 4)])
    """
    return rank * total // parallel, math.ceil((rank + 1) * total / parallel)


def component(shape: Shape, total: int, rank: int, which: str) -> tuple[BlockLayout, int]:
    """Return one component's layout and the bytes of its logical block, packing included."""
    low, high = held(total, shape.parallel, rank)
    heads, kernel = high - low, shape.kernel_block_size
    row = ELEMENTS * ELEMENT_BYTES * (2 if shape.packing == "interleaved" else 1)
    token, head, element = {"HND": (row, kernel * row, ELEMENT_BYTES), "NHD": (heads * row, row, ELEMENT_BYTES)}.get(
        shape.order, (row, kernel * row, ELEMENT_BYTES)
    )
    if shape.order == "TRANSPOSED" and which == "k" and shape.packing != "interleaved":
        token, head, element = ELEMENT_BYTES, kernel * row, kernel * ELEMENT_BYTES
    kernel_bytes = kernel * heads * row * (2 if shape.packing == "packed" else 1)
    spans = tuple(Span(i * kernel, (i + 1) * kernel, i * kernel_bytes, token)
                  for i in range(shape.block_size // kernel))  # fmt: skip
    base = 0
    if which == "v":
        base = {"packed": kernel * heads * row, "interleaved": row // 2}.get(shape.packing, 0)
    axes = [Axis("token", spans), Axis("kv_head", (Span(low, high, 0, head),))]
    dtype, atom = f"bfloat16[{ELEMENTS}]", ELEMENTS * ELEMENT_BYTES
    if element != ELEMENT_BYTES:
        axes.append(Axis("head_dim", (Span(0, ELEMENTS, 0, element),)))
        dtype, atom = "bfloat16", ELEMENT_BYTES
    layout = BlockLayout(tuple(axes), atom, dtype, base, shape.block_size)
    return layout, kernel_bytes * (shape.block_size // kernel)


def engine(name: str, shape: Shape, total: int, *, num_layers: int, num_blocks: int, base: int, gap: int = 261,
) -> EngineLayout:  # fmt: skip
    """Return an engine whose ranks hold ``num_layers`` layers of (k, v); regions are disjoint, ``gap`` bytes apart."""
    ranks = []
    for rank in range(shape.parallel):
        regions: list[Region] = []
        components = []
        for layer in range(num_layers):
            for which in ("k", "v"):
                layout, num_bytes = component(shape, total, rank, which)
                if which == "k" or shape.packing == "split":
                    regions.append(Region(base, num_blocks, num_bytes + gap))
                    base += num_blocks * (num_bytes + gap) + gap
                components.append(ComponentLayout(f"layer.{layer}", which, 0, len(regions) - 1, layout))
        ranks.append(RankLayout(tuple(regions), tuple(components), tp=rank))
    return EngineLayout(name, tuple(ranks))


@st.composite
def shapes(draw: st.DrawFn, *, max_parallel: int = 12, max_block: int = 48) -> Shape:
    """Draw one side's storage."""
    kernel = draw(st.integers(2, max(2, max_block // 3)))
    ratio = draw(st.integers(1, max(1, min(4, max_block // kernel))))
    return Shape(
        draw(st.integers(1, max_parallel)),
        kernel * ratio,
        kernel,
        draw(st.sampled_from(["HND", "NHD", "TRANSPOSED"])),
        draw(st.sampled_from(["split", "packed", "interleaved"])),
    )


@st.composite
def requests(draw: st.DrawFn, source_block: int, destination_block: int, *, num_blocks: int) -> tuple[
    int, BlockTable, BlockTable
]:  # fmt: skip
    """Draw (num_tokens, source table, destination table): partial prefix hits, ragged tails, shuffled ids."""
    limit = (num_blocks - 1) * min(source_block, destination_block)
    num_tokens = draw(st.integers(1, limit))
    s_blocks, d_blocks = math.ceil(num_tokens / source_block), math.ceil(num_tokens / destination_block)
    ids = st.permutations(range(num_blocks))
    source = BlockTable(0, tuple(draw(ids)[:s_blocks]))
    skipped = draw(st.integers(0, d_blocks - 1))
    extra = draw(st.integers(0, 1))
    destination = draw(ids)[: d_blocks - skipped + extra]
    return num_tokens, source, BlockTable(skipped * destination_block, tuple(destination))
