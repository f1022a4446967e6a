"""Spans and axes: which coordinates lie at which bytes, for one axis. No blocks, no ranks.

A span says ``[start, stop) -> offset_bytes + (x - start) * stride_bytes``. Coordinates are global,
literal and half-open; nothing is clamped or wrapped, and negative ones are ordinary (the history of a
convolution is ``width`` in [-w, 0)).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Span:
    """One affine piece of one axis.

    >>> Span(16, 32, offset_bytes=32768, stride_bytes=1024).at(17)
    33792
    """

    start: int
    """First coordinate."""
    stop: int
    """One past the last coordinate."""
    offset_bytes: int = 0
    """Byte offset of ``start``, relative to the block's base."""
    stride_bytes: int = 0
    """Bytes from one coordinate to the next; may be negative."""
    slot: int = 0
    """Which block of the period the coordinates lie in."""

    def __post_init__(self) -> None:
        if self.stop <= self.start:
            raise LayoutError(f"span [{self.start}, {self.stop}) is empty; stop must be greater than start")
        if self.slot < 0:
            raise LayoutError(f"span [{self.start}, {self.stop}) has slot {self.slot}; slots count from 0")

    def __len__(self) -> int:
        return self.stop - self.start

    def at(self, coordinate: int) -> int:
        """Return the byte offset of a coordinate inside the span (not checked to be inside)."""
        return self.offset_bytes + (coordinate - self.start) * self.stride_bytes


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis: spans in ascending order that do not overlap.

    Neighbouring spans that continue each other are merged at construction, so that equal axes compare equal.

    >>> Axis("kv_head", (Span(0, 2, 0, 256), Span(2, 4, 512, 256))).spans
    (Span(start=0, stop=4, offset_bytes=0, stride_bytes=256, slot=0),)
    """

    name: str
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise LayoutError("an axis needs a name")
        if not self.spans:
            raise LayoutError(f"axis {self.name!r} has no spans; a rank that holds nothing of it declares no component")
        merged = tuple(_merge(sorted(self.spans, key=lambda span: span.start)))
        for left, right in itertools.pairwise(merged):
            if right.start < left.stop:
                raise LayoutError(
                    f"axis {self.name!r}: spans [{left.start}, {left.stop}) and [{right.start}, {right.stop}) overlap"
                )
        object.__setattr__(self, "spans", merged)

    def __len__(self) -> int:
        return sum(map(len, self.spans))


def _merge(spans: list[Span]) -> Iterator[Span]:
    held = spans[0]
    for span in spans[1:]:
        joined = _joined(held, span)
        if joined is None:
            yield held
            held = span
        else:
            held = joined
    yield held


def _joined(left: Span, right: Span) -> Span | None:
    """Return the one span that says what both say, or None."""
    if left.slot != right.slot or left.stop != right.start:
        return None
    step = right.offset_bytes - left.at(left.stop - 1)
    if len(left) > 1 and left.stride_bytes != step:
        return None
    if len(right) > 1 and right.stride_bytes != step:
        return None
    return Span(left.start, right.stop, left.offset_bytes, step, left.slot)
