"""Mamba2 state: convolution over x, B and C, and one matrix a head. No Mamba1, no delta net.

Heads are split over TP, and with them the channels of x (``head_dim`` of each head). B and C have ``state_size``
channels for each of ``num_groups`` groups; a rank holds the groups that its heads use, so groups are split as long as
there are as many as ranks and repeated beyond that (vLLM 0.32, ``extra_groups_for_head_shards`` in ``mamba_utils.py``;
there only one group may be repeated, here any number).
Recurrent state: ``[heads, head_dim, state_size]``, a head being one atom.
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
class Mamba2Spec:
    """One Mamba2 layer's state."""

    kind: ClassVar[str] = "mamba2"
    name: str
    group: int = 0
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    conv_kernel: int = 4
    dtype: str = "bfloat16"
    """Element type of the convolution state."""
    ssm_dtype: str = "float32"
    """Element type of the recurrent state."""
    index: int | None = None
    draft: bool = False

    def pages(self, place: Place, cache: CacheGeometry) -> tuple[Page, ...]:
        """Return the one page of the state."""
        heads = held(place.tp_rank, place.tp, self.num_heads)
        groups = held(place.tp_rank, place.tp, self.num_groups)
        x = Projection("conv.x", heads[0] * self.head_dim, heads[1] * self.head_dim)
        b, c = (
            Projection(name, groups[0] * self.state_size, groups[1] * self.state_size) for name in ("conv.b", "conv.c")
        )
        recurrent = Recurrent("state_head", *heads, self.head_dim * self.state_size)
        return (
            state_page((x, b, c), recurrent, cache, width=self.conv_kernel - 1, dtypes=(self.dtype, self.ssm_dtype)),
        )
