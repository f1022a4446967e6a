"""The sparse-attention indexer's keys, beside MLA: one small row a token, the same on every TP rank. No values.

DeepSeek V3.2 keeps 128 fp8 elements and a float32 scale for each 128 of them. Inside one kernel block all elements come
first, then all scales (vLLM 0.32, ``indexer_k_quant_and_cache``), so they are two components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvplan.layouts.formats import ITEM_BYTES, format_tag
from kvplan.layouts.page import Page, Part

if TYPE_CHECKING:
    from kvplan.layouts.geometry import CacheGeometry
    from kvplan.layouts.parallel import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """One indexer's keys. The cache's element type does not apply: the indexer has its own."""

    kind: ClassVar[str] = "indexer"
    name: str
    group: int = 0
    head_dim: int
    dtype: str = "float8_e4m3fn"
    quant_block_size: int | None = None
    """Elements that share one float32 scale; None means no scales."""
    index: int | None = None
    draft: bool = False

    def pages(self, place: Place, cache: CacheGeometry) -> tuple[Page, ...]:
        """Return one page: keys, then scales."""
        row = self.head_dim * ITEM_BYTES[self.dtype]
        size = cache.kernel_tokens * row
        parts: tuple[Part, ...] = (Part("indexer", format_tag(self.dtype, self.head_dim), row, (), 0, row),)
        if self.quant_block_size is not None:
            count = -(-self.head_dim // self.quant_block_size)
            scale = 4 * count
            parts += (Part("indexer_scale", format_tag("float32", count), scale, (), size, scale),)
            size += cache.kernel_tokens * scale
        return (Page(parts, size),)
