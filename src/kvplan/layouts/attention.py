"""Attention caches: K and V of every held head and token. No paging beyond one kernel block.

One kernel block holds N tokens; a rank holds H heads. The layouts and packings are those of ``geometry.py``. Heads are
global coordinates (``kv_head`` in [0, num_kv_heads)). An atom is one head's row, ``dtype[head_dim]``; where a row is no
run of bytes (K under ``TRANSPOSED``), ``head_dim`` is an axis and the atom one element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvplan.layouts.formats import ITEM_BYTES, format_tag
from kvplan.layouts.page import Page, Part
from kvplan.layouts.parallel import held
from kvplan.planner import Axis, Span

if TYPE_CHECKING:
    from kvplan.layouts.geometry import CacheGeometry
    from kvplan.layouts.parallel import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One attention layer's K and V."""

    kind: ClassVar[str] = "attention"
    name: str
    group: int = 0
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    """Elements of a row of V; None means those of K."""
    dtype: str = "bfloat16"
    index: int | None = None
    """Decoder layer, which decides the pipeline stage; None means the first number in the name."""
    draft: bool = False
    """True for a draft model's layer, which the other side may lack."""

    def pages(self, place: Place, cache: CacheGeometry) -> tuple[Page, ...]:
        """Return one page, or K's and V's when they are split."""
        dtype = self.dtype if cache.dtype == "auto" else cache.dtype
        heads = held(place.head_rank, place.head_parts, self.num_kv_heads)
        rows = _Rows(cache, dtype, heads, self.head_dim, self.head_dim_v or self.head_dim)
        return rows.split() if cache.kv_packing == "split" else (rows.joint(),)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one kernel block of one rank: sizes, strides, parts."""

    cache: CacheGeometry
    dtype: str
    heads: tuple[int, int]
    dim_k: int
    dim_v: int

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_rows(self) -> int:
        return self.num_heads * self.cache.kernel_tokens

    @property
    def scale_bytes(self) -> int:
        return 0 if self.cache.scales == "none" else ITEM_BYTES[self.cache.scale_dtype]

    def row_bytes(self, dim: int) -> int:
        """Return one row's bytes, with its scale when that is inside."""
        inside = self.scale_bytes if self.cache.scales == "inside" else 0
        return dim * ITEM_BYTES[self.dtype] + inside

    def strides(self, row: int) -> tuple[int, int]:
        """Return (token stride, head stride) of rows of that many bytes, in the layout's order."""
        if self.cache.kv_layout == "NHD":
            return self.num_heads * row, row
        return row, self.cache.kernel_tokens * row

    def split(self) -> tuple[Page, Page]:
        """Return K's page and V's page."""
        return (self._alone("k", self.dim_k), self._alone("v", self.dim_v))

    def _alone(self, name: str, dim: int) -> Page:
        row = self.row_bytes(dim)
        size = self.num_rows * row
        return self._finish(self._tensor(name, dim, 0, self.strides(row)), (name,), size)

    def joint(self) -> Page:
        """Return the one page that holds both K and V."""
        key, value = self.row_bytes(self.dim_k), self.row_bytes(self.dim_v)
        size = self.num_rows * (key + value)
        if self.cache.kv_packing != "interleaved":
            first = self._tensor("k", self.dim_k, 0, self.strides(key))
            second = self._tensor("v", self.dim_v, self.num_rows * key, self.strides(value))
        elif self.cache.kv_layout == "TRANSPOSED":
            tokens = self.cache.kernel_tokens
            head = tokens * (key + value)
            first = self._tensor("k", self.dim_k, 0, (key, head))
            second = self._tensor("v", self.dim_v, tokens * key, (value, head))
        else:
            both = self.strides(key + value)
            first = self._tensor("k", self.dim_k, 0, both)
            second = self._tensor("v", self.dim_v, key, both)
        return self._finish(first + second, ("k", "v"), size)

    def _tensor(self, name: str, dim: int, offset: int, strides: tuple[int, int]) -> tuple[Part, ...]:
        """Return K or V, and its scale when that lies inside the row."""
        item = ITEM_BYTES[self.dtype]
        if name == "k" and self.cache.kv_layout == "TRANSPOSED":
            column = Axis("head_dim", (Span(0, dim, 0, self.cache.kernel_tokens * item),))
            return (Part(name, self.dtype, item, (self._head_axis(strides[1]), column), offset, item),)
        axes = (self._head_axis(strides[1]),)
        rows = Part(name, format_tag(self.dtype, dim), dim * item, axes, offset, strides[0])
        if self.cache.scales != "inside":
            return (rows,)
        return (rows, self._scale(name, offset + dim * item, strides))

    def _finish(self, parts: tuple[Part, ...], names: tuple[str, ...], size: int) -> Page:
        """Return the page, with the scales after it when they lie beside it."""
        if self.cache.scales == "beside":
            strides = self.strides(self.scale_bytes)
            for name in names:
                parts += (self._scale(name, size, strides),)
                size += self.num_rows * self.scale_bytes
        return Page(parts, size)

    def _scale(self, name: str, offset: int, strides: tuple[int, int]) -> Part:
        axes = (self._head_axis(strides[1]),)
        return Part(f"{name}_scale", self.cache.scale_dtype, self.scale_bytes, axes, offset, strides[0])

    def _head_axis(self, stride: int) -> Axis:
        return Axis("kv_head", (Span(*self.heads, 0, stride),))
