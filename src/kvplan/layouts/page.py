"""Pages: what a layer keeps in one kernel block, and placing it in a logical block. No layer kind, no rank rules.

A kind of layer says what one *kernel block* holds (a :class:`Page` of :class:`Part`); this file repeats it over the
kernel blocks of a logical block and over the tokens that a rank holds:

1. The logical block is ``block_size`` local tokens, token ``j`` in kernel block ``j // kernel``, at row ``j % kernel``.
2. Under context parallel with interleave I, local token ``j`` is global token
   ``((j // I) * dcp + dcp_rank) * I + j % I`` of the ``block_size * dcp`` tokens that a block id stands for.
3. Pieces on which both steps are affine become spans; the planner's axis joins those that continue each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.errors import DescriptionError
from kvplan.planner import Axis, BlockLayout, Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.layouts.geometry import CacheGeometry
    from kvplan.layouts.parallel import Parallel, Place


@dataclass(frozen=True, slots=True)
class Part:
    """One component inside one kernel block."""

    component: str
    format: str
    atom_bytes: int
    axes: tuple[Axis, ...]
    """Every axis but the token's; offsets count from ``offset_bytes``."""
    offset_bytes: int
    """Where the part begins in the page."""
    token_stride_bytes: int | None = None
    """Bytes from one token to the next; None for state."""


@dataclass(frozen=True, slots=True)
class Page:
    """What one layer keeps in one kernel block of one region."""

    parts: tuple[Part, ...]
    num_bytes: int

    @property
    def is_state(self) -> bool:
        """True when no part has tokens; then a page is a whole block."""
        return all(part.token_stride_bytes is None for part in self.parts)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How the tokens of one rank fill one logical block."""

    block_size: int
    kernel_tokens: int
    dcp: int
    dcp_rank: int
    interleave: int

    def __post_init__(self) -> None:
        if self.dcp > 1 and self.block_size % self.interleave:
            raise DescriptionError(
                f"dcp_interleave is {self.interleave}, block_size is {self.block_size}; whole interleaves make a block",
                field="parallel.dcp_interleave",
            )

    @property
    def tokens_per_block(self) -> int:
        """Tokens of the sequence that one block id stands for."""
        return self.block_size * self.dcp

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first local token, first global token, tokens) of each affine piece.

        >>> list(BlockShape(4, 4, dcp=2, dcp_rank=1, interleave=2).pieces())
        [(0, 2, 2), (2, 6, 2)]
        """
        chunk = self.interleave if self.dcp > 1 else self.block_size
        cuts = sorted({*range(0, self.block_size, chunk), *range(0, self.block_size, self.kernel_tokens)})
        for start, stop in zip(cuts, [*cuts[1:], self.block_size], strict=True):
            first = ((start // chunk) * self.dcp + self.dcp_rank) * chunk + start % chunk
            yield start, first, stop - start

    def token_axis(self, token_stride_bytes: int, kernel_stride_bytes: int) -> Axis:
        """Return the token axis of a part, given its stride and the distance of two kernel blocks."""
        return Axis(
            "token",
            tuple(
                Span(
                    first,
                    first + count,
                    local // self.kernel_tokens * kernel_stride_bytes + local % self.kernel_tokens * token_stride_bytes,
                    token_stride_bytes,
                )
                for local, first, count in self.pieces()
            ),
        )


def block_shape(cache: CacheGeometry, parallel: Parallel, place: Place) -> BlockShape:
    """Return the shape of a logical block of one group on one rank."""
    return BlockShape(
        block_size=cache.block_size,
        kernel_tokens=cache.kernel_tokens,
        dcp=place.dcp,
        dcp_rank=place.dcp_rank,
        interleave=parallel.dcp_interleave,
    )


def place_part(part: Part, shape: BlockShape, *, base_bytes: int, kernel_stride_bytes: int) -> BlockLayout:
    """Return the block layout of a part whose page begins at ``base_bytes`` of each kernel block."""
    base = base_bytes + part.offset_bytes
    if part.token_stride_bytes is None:
        return BlockLayout(part.axes, part.atom_bytes, part.format, base)
    token = shape.token_axis(part.token_stride_bytes, kernel_stride_bytes)
    return BlockLayout((token, *part.axes), part.atom_bytes, part.format, base, shape.tokens_per_block)
