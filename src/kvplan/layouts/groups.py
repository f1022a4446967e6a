"""KV cache groups: which layers share one block table, as vLLM 0.32 decides it. No bytes.

1. Layers of one spec form a bucket, in order of first appearance.
2. One bucket, or only full attention of any kind: one group.
3. Otherwise groups have one size: the smallest bucket's, or the largest's when that is less than half as large again.
   A bucket of n layers becomes ``ceil(n / size)`` groups, and its j-th layer goes to the ``j mod groups``-th, so that
   every pipeline stage finds layers of every group (``_get_kv_cache_groups_uniform_page_size``).
4. The i-th layers of all groups share memory: see ``arrange.py``.

Draft layers join the group of layers of their own spec, if there is one, else they are a group of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.layouts.engine import LayerSpec

FULL_KINDS = frozenset({"attention", "mla", "indexer"})
"""Kinds that need a slot for every token."""


def assign_groups(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with their group's index put in."""
    if all(layer.kind in FULL_KINDS for layer in layers):
        return tuple(replace(layer, group=0) for layer in layers)
    buckets: dict[LayerSpec, list[int]] = {}
    for i, layer in enumerate(layers):
        buckets.setdefault(replace(layer, name="", group=0, index=None, draft=False), []).append(i)
    size = _group_size([len(members) for members in buckets.values()])
    group_of: dict[int, int] = {}
    first = 0
    for members in buckets.values():
        count = -(-len(members) // size)
        group_of |= {layer: first + place % count for place, layer in enumerate(members)}
        first += count
    return tuple(replace(layer, group=group_of[i]) for i, layer in enumerate(layers))


def _group_size(counts: list[int]) -> int:
    """Return layers per group.

    >>> _group_size([10, 52]), _group_size([12, 13])
    (10, 13)
    """
    least, most = min(counts), max(counts)
    return most if most < 1.5 * least else least
