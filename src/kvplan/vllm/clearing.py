"""Clears what a load leaves unwritten in a request's border blocks, where old bytes could be read as numbers. No loads.

A load fills the tokens that the producer has. The last block of a table may end behind them, and the first block of a
window may begin before them. Attention multiplies the rows behind a sequence's end by zero, and zero times NaN is NaN
(measured with vLLM 0.32's CPU kernel). Old cache of the same format is finite, but in models with state a block may
have held float32 state before, read as bfloat16 now. vLLM zeroes new blocks of such models
(``KVCacheConfig.needs_kv_cache_zeroing``), except those that a connector loads; so the connector clears them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplan.planner import HOLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvplan.planner import BlockTable


class Clearer:
    """Clears border blocks of attention groups; does nothing for models whose blocks need no clearing."""

    def __init__(self, kv_cache_config: Any, kv_caches: Mapping[str, Any], *, is_state: Sequence[bool]) -> None:
        self._num_blocks = kv_cache_config.num_blocks
        self._tensors: list[list[Any]] = []
        needed = kv_cache_config.needs_kv_cache_zeroing
        for group, state in zip(kv_cache_config.transfer_groups, is_state, strict=True):
            names = group.layer_names if needed and not state else ()
            self._tensors.append([kv_caches[name] for name in names if name in kv_caches])

    def clear(self, tables: Sequence[BlockTable]) -> int:
        """Zero the first and the last block of each attention table, before the load begins; return how many."""
        cleared = 0
        for tensors, table in zip(self._tensors, tables, strict=True):
            held = [block_id for block_id in table.block_ids if block_id != HOLE]
            for block_id in {*held[:1], *held[-1:]} if tensors else ():
                for tensor in tensors:
                    ratio = tensor.shape[0] // self._num_blocks
                    tensor[block_id * ratio : (block_id + 1) * ratio].zero_()
                cleared += 1
        if cleared:
            self._wait()
        return cleared

    def _wait(self) -> None:
        """Wait for the device: a load from another process is not ordered behind its queue."""
        device = next(tensor.device for tensors in self._tensors for tensor in tensors)
        if device.type == "cuda":
            import torch

            torch.cuda.current_stream(device).synchronize()
