"""How an engine pages its cache: block sizes, orders, packing. No layer, no rank.

Layouts of attention (``kv_layout``), inside one kernel block of one rank, H heads, N tokens, D elements of a head:

- ``HND``: ``[H, N, D]``. ``NHD``: ``[N, H, D]``.
- ``TRANSPOSED``: K is ``[H, D, N]``, V is ``[H, N, D]``, as vLLM 0.32's CPU attention stores them.

Packing of K and V (``kv_packing``):

- ``split``: two regions, K and V.
- ``packed``: K of all heads, then V of all heads, inside each kernel block.
- ``interleaved``: K and V adjacent in the last axis (``[..., D + D]``); under ``TRANSPOSED``, where a row is no
  run of bytes, one head's K and then its V. These are vLLM 0.32's shapes on GPU and CPU.
- ``blocks_first``: one region for all layers, the block outermost: ``[kernel block, layer, K then V]``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvplan.errors import DescriptionError

KVLayout = Literal["HND", "NHD", "TRANSPOSED"]
KVPacking = Literal["split", "packed", "interleaved", "blocks_first"]
ConvLayout = Literal["SD", "DS"]
Device = Literal["cpu", "cuda"]
ScalePlacement = Literal["none", "beside", "inside"]


MAX_BLOCK_SIZE = 1 << 20
"""Tokens; more than any block has."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """What one KV cache group has of its own; None means the engine's value."""

    group: int
    block_size: int | None = None
    kernel_block_size: int | None = None


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """How one engine stores its cache."""

    block_size: int = 16
    """Tokens of a logical block on one rank."""
    kernel_block_size: int | None = None
    """Tokens of a kernel block; None means the logical block."""
    num_blocks: int = 1000
    """Logical blocks in each region."""
    kv_layout: KVLayout = "HND"
    kv_packing: KVPacking = "split"
    conv_layout: ConvLayout = "SD"
    """Convolution state: ``SD`` is ``[width, channel]``, ``DS`` is ``[channel, width]``."""
    dtype: str = "auto"
    """Element type of attention caches; auto means the layer's."""
    scales: ScalePlacement = "none"
    """Per token and head scales: ``beside`` lie after K and V of a kernel block, ``inside`` after each row."""
    scale_dtype: str = "float32"
    conv_dtype: str = "auto"
    """Element type of convolution state; auto means the layer's."""
    ssm_dtype: str = "auto"
    """Element type of the recurrent state; auto means the layer's."""
    shared_regions: bool = False
    """True: the i-th layers of all groups share one region (hybrid memory), padded to the largest page."""
    block_stride_bytes: int | None = None
    """Least distance of two blocks; None means no padding beyond what sharing asks for."""
    device: Device = "cpu"
    """Where the cache lies: host memory, or one GPU for each rank."""
    groups: tuple[GroupGeometry, ...] = ()

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise DescriptionError(f"{name} is {getattr(self, name)}; it is at least 1", field=f"cache.{name}")
        if self.block_size > MAX_BLOCK_SIZE:
            raise DescriptionError(f"{self.block_size} tokens; at most {MAX_BLOCK_SIZE}", field="cache.block_size")
        _check_kernel_block(self.block_size, self.kernel_block_size, "cache")
        if len({item.group for item in self.groups}) != len(self.groups):
            raise DescriptionError("a group is named twice", field="cache.groups")
        for item in self.groups:
            mine = self.of_group(item.group)
            _check_kernel_block(mine.block_size, mine.kernel_block_size, f"cache.groups.{item.group}")
        if self.scales == "inside" and self.kv_layout == "TRANSPOSED":
            raise DescriptionError(
                "scales: inside needs rows, and K has none under kv_layout TRANSPOSED; use beside", field="cache.scales"
            )

    def of_group(self, group: int) -> CacheGeometry:
        """Return the geometry with one group's own block sizes put in."""
        own = next((item for item in self.groups if item.group == group), None)
        if own is None:
            return self if not self.groups else replace(self, groups=())
        kernel = own.kernel_block_size
        if kernel is None and own.block_size is None:
            kernel = self.kernel_block_size
        return replace(self, block_size=own.block_size or self.block_size, kernel_block_size=kernel, groups=())

    @property
    def kernel_tokens(self) -> int:
        """Tokens of one kernel block."""
        return self.kernel_block_size or self.block_size

    @property
    def num_kernel_blocks(self) -> int:
        """Kernel blocks in one logical block."""
        return self.block_size // self.kernel_tokens


def _check_kernel_block(block_size: int, kernel_block_size: int | None, where: str) -> None:
    if kernel_block_size is None:
        return
    if kernel_block_size < 1 or block_size % kernel_block_size:
        raise DescriptionError(
            f"kernel_block_size is {kernel_block_size}, block_size is {block_size}; "
            "whole kernel blocks make a logical block",
            field=f"{where}.kernel_block_size",
        )
