"""Gated delta net state (Qwen3-Next): convolution over q, k and v, and one matrix a value head. No attention.

Key heads and value heads are split over TP (vLLM 0.32, ``gated_delta_net_state_shape``): channels of q and of k are
those of the key heads, channels of v those of the value heads. Recurrent state:
``[value heads, head_v_dim, head_k_dim]``, a head being one atom.
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
class GdnSpec:
    """One gated delta net layer's state."""

    kind: ClassVar[str] = "gdn"
    name: str
    group: int = 0
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4
    dtype: str = "bfloat16"
    """Element type of the convolution state."""
    ssm_dtype: str = "bfloat16"
    """Element type of the recurrent state."""
    index: int | None = None
    draft: bool = False

    def pages(self, place: Place, cache: CacheGeometry) -> tuple[Page, ...]:
        """Return the one page of the state."""
        k_heads = held(place.tp_rank, place.tp, self.num_k_heads)
        v_heads = held(place.tp_rank, place.tp, self.num_v_heads)
        q, k = (
            Projection(name, k_heads[0] * self.head_k_dim, k_heads[1] * self.head_k_dim)
            for name in ("conv.q", "conv.k")
        )
        v = Projection("conv.v", v_heads[0] * self.head_v_dim, v_heads[1] * self.head_v_dim)
        recurrent = Recurrent("state_head", *v_heads, self.head_v_dim * self.head_k_dim)
        return (
            state_page((q, k, v), recurrent, cache, width=self.conv_kernel - 1, dtypes=(self.dtype, self.ssm_dtype)),
        )
