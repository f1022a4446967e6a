"""Hybrid memory: how large a block must be so that a state fits into it. Arithmetic only.

Where attention and state share regions, vLLM 0.32 makes the attention block so long that its page is at least the
state's, in whole steps of an alignment, and pads the state's page to it (``_align_hybrid_block_size`` in
``platforms/interface.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.errors import DescriptionError
from kvplan.layouts.engine import STATE_KINDS, layer_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.layouts.engine import LayerSpec
    from kvplan.layouts.geometry import CacheGeometry
    from kvplan.layouts.parallel import Parallel

BLOCK_ALIGNMENT = 16
"""Tokens: vLLM's default block size, which is its alignment where no kernel asks for more."""
KERNEL_BLOCK_SIZES = (16, 32, 64)
"""Kernel blocks that attention kernels offer."""


def block_size_for_state(state_bytes: int, token_bytes: int, *, alignment: int = BLOCK_ALIGNMENT) -> int:
    """Return the least whole number of alignments whose attention page holds a state.

    ``token_bytes`` is what one token of one attention layer takes on one rank.

    >>> block_size_for_state(2134016, 512, alignment=32)
    4192
    """
    return alignment * -(-state_bytes // (alignment * token_bytes))


def largest_kernel_block(block_size: int, sizes: Sequence[int] = KERNEL_BLOCK_SIZES) -> int:
    """Return the largest kernel block that divides a logical block.

    >>> largest_kernel_block(4192), largest_kernel_block(2112), largest_kernel_block(4176)
    (32, 64, 16)
    """
    found = [size for size in sizes if block_size % size == 0]
    if not found:
        raise DescriptionError(
            f"block_size is {block_size}; none of the kernel blocks {list(sizes)} divides it", field="cache.block_size"
        )
    return max(found)


def kernel_pages(page_bytes: int, kernel_page_bytes: int) -> int:
    """Return how many kernel pages make one page; refuses a part of one.

    >>> kernel_pages(540672, 8192)
    66
    """
    if page_bytes % kernel_page_bytes:
        raise DescriptionError(
            f"a page of {page_bytes} bytes is {page_bytes / kernel_page_bytes:g} kernel pages of {kernel_page_bytes} "
            "bytes; whole ones are needed",
            field="cache.kernel_block_size",
        )
    return page_bytes // kernel_page_bytes


def automatic_block_size(layers: Sequence[LayerSpec], parallel: Parallel, cache: CacheGeometry) -> int:
    """Return the block size that vLLM would choose: 16, or more where a state must fit into the attention page."""
    place = next(parallel.places())
    states = [layer_pages(layer, place, cache)[0].num_bytes for layer in layers if layer.kind in STATE_KINDS]
    tokens = [
        sum(page.num_bytes for page in layer_pages(layer, place, cache)) // cache.kernel_tokens
        for layer in layers
        if layer.kind not in STATE_KINDS
    ]
    if not states or not tokens or not cache.shared_regions:
        return cache.block_size
    return max(cache.block_size, block_size_for_state(max(states), max(tokens), alignment=cache.block_size))
