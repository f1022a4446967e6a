"""Every atom of a request by name and address, one by one from the declarations: no plan, no arrays.

It is what verification is measured against: which atom is the first wrong one, what it is called and where it lies.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import NamedTuple

ELEMENTS = "head_dim"
"""What an atom of many elements is divided by where the other side declares single ones."""


class Key(NamedTuple):
    """One atom's name. Keys of one component sort as people are told: by coordinates, then by token."""

    layer: str
    component: str
    coordinates: tuple[tuple[str, int], ...]
    """By name, the token or block last."""


def content(key, num_bytes):
    """Return the bytes that an atom of that name holds: in every process the same."""
    return hashlib.shake_128(repr(key).encode()).digest(num_bytes)


def fine_components(*engines):
    """Return the (layer, component) that some rank declares element by element."""
    items = [item for engine in engines for rank in engine.ranks for item in rank.components]
    return {item.key for item in items if any(axis.name == ELEMENTS for axis in item.block.axes)}


def atoms_of(rank, tables, num_tokens, fine):
    """Return {key: (address, bytes)} of a request on one rank, in the order of the declarations."""
    found = {}
    for item in rank.components:
        block = item.block
        named = [(axis.name, [(x, s.offset_bytes + (x - s.start) * s.stride_bytes)
                              for s in axis.spans for x in range(s.start, s.stop)]) for axis in block.axes]  # fmt: skip
        size = block.atom_bytes
        count = int(block.format.partition("[")[2].rstrip("]") or 1)
        if item.key in fine and count > 1:
            size //= count
            named.append((ELEMENTS, [(j, j * size) for j in range(count)]))
        others = sorted((name, places) for name, places in named if name != "token")
        tokens = dict(named).get("token")
        table = tables[item.group]
        base = rank.regions[item.region].base + block.base_bytes
        stride = rank.regions[item.region].block_stride_bytes
        for combination in itertools.product(*(places for _, places in others)):
            strand = tuple((name, x) for (name, _), (x, _) in zip(others, combination, strict=True))
            offset = base + sum(o for _, o in combination)
            for index, block_id in enumerate(table.block_ids):
                first = table.first_token + index * (block.tokens_per_block or 0)
                for token, place in tokens or [(None, 0)]:
                    along = ("block", index) if token is None else ("token", first + token)
                    if block_id >= 0 and (token is None or first + token < num_tokens):
                        key = Key(*item.key, (*strand, along))
                        found[key] = (offset + block_id * stride + place, size)
    return found
