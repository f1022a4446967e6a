"""What vLLM registered for one layer, as plain numbers, and which region it lies in. No heads, no tokens, no packing.

A layer's cache is a tensor ``[kernel blocks, heads, rows, content]`` with any strides (vLLM 0.32,
``v1/kv_cache_interface.py``, ``create_kv_cache_views``). Its region:

1. Logical block ``b`` starts at ``address + b * block_stride_bytes``; the region is that range, when it lies inside
   the tensor's storage.
2. Where layers lie behind one another in each block (the block outermost), the last block's stride would leave the
   storage: then the region begins at the block's start, and the layer at an offset inside it.
3. Equal regions are one region, whichever groups their layers belong to: block ids keep groups apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplan.errors import UnsupportedError
from kvplan.planner import Region

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache tensor. Strides and sizes are bytes."""

    layer: str
    address: int
    shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    item_bytes: int
    dtype: str
    """Element type as torch prints it, without the prefix."""
    device: str
    storage_address: int
    storage_bytes: int
    num_blocks: int
    """Logical blocks."""
    backend: str = ""
    """Name of the attention backend, for messages."""

    @property
    def num_kernel_blocks(self) -> int:
        """Kernel blocks in one logical block."""
        return self.shape[0] // self.num_blocks

    @property
    def block_stride_bytes(self) -> int:
        """Bytes from one logical block to the next."""
        return self.stride_bytes[0] * self.num_kernel_blocks

    def refuse(self, why: str) -> UnsupportedError:
        """Return the error that names this layer, shape, strides and backend."""
        return UnsupportedError(
            f"layer {self.layer!r}: {why} (shape {list(self.shape)}, strides {list(self.stride_bytes)} bytes, "
            f"{self.dtype}, {self.num_blocks} blocks, backend {self.backend or 'unknown'})"
        )


def layer_cache(layer: str, tensor: Any, *, num_blocks: int, backend: str = "") -> LayerCache:
    """Return the facts of one registered tensor; a tensor that is not paged by blocks in its first axis is refused."""
    if isinstance(tensor, list | tuple) or not hasattr(tensor, "untyped_storage"):
        raise UnsupportedError(f"layer {layer!r}: its cache is a {type(tensor).__name__}; one tensor per layer works")
    storage = tensor.untyped_storage()
    item = tensor.element_size()
    cache = LayerCache(
        layer=layer,
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        stride_bytes=tuple(stride * item for stride in tensor.stride()),
        item_bytes=item,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        storage_address=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
        num_blocks=num_blocks,
        backend=backend,
    )
    if len(cache.shape) != 4 or cache.shape[0] < num_blocks or cache.shape[0] % num_blocks:
        raise cache.refuse("the cache is not [kernel blocks, heads, rows, content]")
    return cache


def storages(caches: Mapping[str, LayerCache]) -> tuple[tuple[int, int, str], ...]:
    """Return (address, bytes, device) of every distinct storage: what is registered with a transport."""
    return tuple(sorted({(item.storage_address, item.storage_bytes, item.device) for item in caches.values()}))


class Regions:
    """Collects regions; equal ones are one."""

    def __init__(self) -> None:
        self._index: dict[Region, int] = {}

    def place(self, cache: LayerCache) -> tuple[int, int]:
        """Return (region index, offset of the layer inside each of its blocks)."""
        stride, inside = cache.block_stride_bytes, 0
        end = cache.storage_address + cache.storage_bytes
        if cache.address + cache.num_blocks * stride > end:
            inside = (cache.address - cache.storage_address) % stride
        base = cache.address - inside
        if base < cache.storage_address or base + cache.num_blocks * stride > end:
            raise cache.refuse("its blocks leave the memory that was allocated for it")
        region = Region(base, cache.num_blocks, stride, cache.device)
        return self._index.setdefault(region, len(self._index)), inside

    def all(self) -> tuple[Region, ...]:
        """Return the regions in the order of their indices."""
        return tuple(self._index)
