"""Arranging pages in regions: which region, at which offset, how far apart. No addresses, no kinds.

Three ways, all keyed by position, never by kind:

- by layer: each page of each layer has a region of its own.
- shared (hybrid memory): the i-th layers of all groups share a region, block ids keep them apart; the block stride is
  that of the largest page (vLLM 0.32: "groups alias from byte 0", ``get_kv_cache_config_from_groups``).
- blocks first: one region for a group's layers (for all groups when shared); the kernel block is outermost, because a
  kernel's view of one layer has one stride from kernel block to kernel block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.errors import DescriptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvplan.layouts.geometry import CacheGeometry
    from kvplan.layouts.page import Page


@dataclass(frozen=True, slots=True)
class Arranged:
    """Where one page of one layer lies."""

    layer: int
    """Index of the layer on this rank."""
    page: int
    """Index of the page among the layer's."""
    region: int
    base_bytes: int
    """Offset of the page in each kernel block."""
    kernel_stride_bytes: int
    """Bytes from one kernel block to the next."""


def arrange(
    pages: tuple[tuple[Page, ...], ...],
    groups: tuple[int, ...],
    num_kernel_blocks: Mapping[int, int],
    cache: CacheGeometry,
) -> tuple[tuple[Arranged, ...], tuple[int, ...]]:
    """Return where each page lies, and each region's block stride in bytes.

    ``pages`` and ``groups`` are by layer of one rank; ``num_kernel_blocks`` by group.
    """
    ways = {True: _blocks_first, False: _by_layer}[cache.kv_packing == "blocks_first"]
    keys: dict[tuple[int, ...], int] = {}
    live: list[int] = []
    arranged: list[Arranged] = []
    for layer, page, key, base, kernel_stride in ways(pages, groups, shared=cache.shared_regions):
        region = keys.setdefault(key, len(keys))
        repeats = 1 if pages[layer][page].is_state else num_kernel_blocks[groups[layer]]
        live += [0] * (region + 1 - len(live))
        live[region] = max(live[region], kernel_stride * repeats)
        arranged.append(Arranged(layer, page, region, base, kernel_stride))
    return tuple(arranged), tuple(_stride(cache, num_bytes) for num_bytes in live)


_Way = tuple[int, int, tuple[int, ...], int, int]


def _by_layer(pages: tuple[tuple[Page, ...], ...], groups: tuple[int, ...], *, shared: bool) -> Iterator[_Way]:
    """Yield (layer, page, region key, base, kernel stride) of pages that have their kernel blocks to themselves."""
    seen: dict[int, int] = {}
    for layer, own in enumerate(pages):
        position = seen.get(groups[layer], 0)
        seen[groups[layer]] = position + 1
        for index, page in enumerate(own):
            yield layer, index, (position if shared else layer, index), 0, page.num_bytes


def _blocks_first(pages: tuple[tuple[Page, ...], ...], groups: tuple[int, ...], *, shared: bool) -> Iterator[_Way]:
    """Yield the same, of pages that lie behind one another in each kernel block of their group."""
    total: dict[int, int] = {}
    bases: list[int] = []
    for own, group in zip(pages, groups, strict=True):
        bases.append(total.get(group, 0))
        total[group] = bases[-1] + own[0].num_bytes
    for layer, group in enumerate(groups):
        yield layer, 0, (0 if shared else group,), bases[layer], total[group]


def _stride(cache: CacheGeometry, live_bytes: int) -> int:
    if cache.block_stride_bytes is None:
        return live_bytes
    if cache.block_stride_bytes < live_bytes:
        raise DescriptionError(
            f"block_stride_bytes is {cache.block_stride_bytes}, a block holds {live_bytes} bytes; it must not be less",
            field="cache.block_stride_bytes",
        )
    return cache.block_stride_bytes
