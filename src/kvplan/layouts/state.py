"""What recurrent states have in common: a convolution history and a recurrent state in one page. No model's sizes.

A page is the convolution state, then the recurrent state (vLLM 0.32, ``MambaSpec``). The convolution state keeps the
last ``w = conv_kernel - 1`` inputs of some channels, as ``[w, channels]`` (SD) or ``[channels, w]`` (DS). Its channels
are the concatenation of sub-projections (x, B, C or q, k, v), each split over TP by itself, so each is a component:

- axis ``channel``: global channels of that sub-projection. Axis ``width``: [-w, 0), -1 being the newest input.
- the atom is one element, because the two orders share no longer run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.layouts.formats import ITEM_BYTES, format_tag
from kvplan.layouts.page import Page, Part
from kvplan.planner import Axis, Span

if TYPE_CHECKING:
    from kvplan.layouts.geometry import CacheGeometry


@dataclass(frozen=True, slots=True)
class Projection:
    """The channels of one sub-projection that a rank holds."""

    component: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The recurrent state that a rank holds: an interval of one axis, each coordinate ``atom_elements`` together."""

    axis: str
    start: int
    stop: int
    atom_elements: int


def state_page(
    projections: tuple[Projection, ...],
    recurrent: Recurrent,
    cache: CacheGeometry,
    *,
    width: int,
    dtypes: tuple[str, str],
) -> Page:
    """Return the page of a layer: convolution, then recurrent state. ``dtypes`` are the layer's, the cache's win."""
    conv = dtypes[0] if cache.conv_dtype == "auto" else cache.conv_dtype
    ssm = dtypes[1] if cache.ssm_dtype == "auto" else cache.ssm_dtype
    channels = sum(item.stop - item.start for item in projections)
    parts = tuple(_conv_parts(projections, channels, width, conv, ds=cache.conv_layout == "DS"))
    size = channels * width * ITEM_BYTES[conv]
    atom = recurrent.atom_elements * ITEM_BYTES[ssm]
    axis = Axis(recurrent.axis, (Span(recurrent.start, recurrent.stop, 0, atom),))
    parts += (Part("ssm", format_tag(ssm, recurrent.atom_elements), atom, (axis,), size),)
    return Page(parts, size + (recurrent.stop - recurrent.start) * atom)


def _conv_parts(projections: tuple[Projection, ...], channels: int, width: int, dtype: str, *, ds: bool) -> list[Part]:
    item = ITEM_BYTES[dtype]
    channel_stride, width_stride = (width * item, item) if ds else (item, channels * item)
    parts: list[Part] = []
    before = 0
    for projection in projections:
        axes = (
            Axis("channel", (Span(projection.start, projection.stop, 0, channel_stride),)),
            Axis("width", (Span(-width, 0, 0, width_stride),)),
        )
        parts.append(Part(projection.component, dtype, item, axes, before * channel_stride))
        before += projection.stop - projection.start
    return parts
