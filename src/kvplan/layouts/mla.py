"""Latent attention (MLA): one row a token, the same on every TP rank. No heads.

The row is the compressed K and V with its rotary part (DeepSeek V2/V3: 512 + 64 elements). It has no head to split, so
every TP rank holds it whole; context parallel still splits its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvplan.layouts.formats import ITEM_BYTES, format_tag
from kvplan.layouts.page import Page, Part

if TYPE_CHECKING:
    from kvplan.layouts.geometry import CacheGeometry
    from kvplan.layouts.parallel import Place

FP8_DS_MLA_BYTES = 656
"""Bytes of a ``fp8_ds_mla`` row: 512 fp8, 4 float32 scales, 64 bfloat16 (vLLM 0.32, ``flashmla_sparse.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """One MLA layer's latent rows."""

    kind: ClassVar[str] = "mla"
    name: str
    group: int = 0
    latent_dim: int
    dtype: str = "bfloat16"
    index: int | None = None
    draft: bool = False

    def pages(self, place: Place, cache: CacheGeometry) -> tuple[Page, ...]:
        """Return one page of rows."""
        dtype = self.dtype if cache.dtype == "auto" else cache.dtype
        count = FP8_DS_MLA_BYTES if dtype == "fp8_ds_mla" else self.latent_dim
        row = count * ITEM_BYTES[dtype]
        part = Part("latent", format_tag(dtype, count), row, (), 0, row)
        return (Page((part,), cache.kernel_tokens * row),)
