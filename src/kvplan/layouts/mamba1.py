"""Mamba1 state: convolution over the inner channels, and ``state_size`` values for each of them. No heads.

Channels are split over TP (vLLM 0.32, ``mamba1_state_shape``): convolution ``[w, inner/tp]`` or its transpose,
recurrent state ``[inner/tp, state_size]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvplan.layouts.parallel import held
from kvplan.layouts.state import Projection, Recurrent, state_page

if TYPE_CHECKING:
    from kvplan.layouts.geometry import CacheGeometry
    from kvplan.layouts.page import Page
    from kvplan.layouts.parallel import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Spec:
    """One Mamba1 layer's state."""

    kind: ClassVar[str] = "mamba1"
    name: str
    group: int = 0
    intermediate_size: int
    state_size: int
    conv_kernel: int = 4
    dtype: str = "bfloat16"
    """Element type of the convolution state."""
    ssm_dtype: str = "bfloat16"
    """Element type of the recurrent state."""
    index: int | None = None
    draft: bool = False

    def pages(self, place: Place, cache: CacheGeometry) -> tuple[Page, ...]:
        """Return the one page of the state."""
        start, stop = held(place.tp_rank, place.tp, self.intermediate_size)
        return (
            state_page(
                (Projection("conv.x", start, stop),),
                Recurrent("channel", start, stop, self.state_size),
                cache,
                width=self.conv_kernel - 1,
                dtypes=(self.dtype, self.ssm_dtype),
            ),
        )
