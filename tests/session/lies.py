"""Layouts on the wire in which one number is a lie. What is sound and false, and what contradicts itself; no checks."""

from __future__ import annotations

from msgspec.structs import replace


def _ranks(body, change):
    return replace(body, ranks=tuple(change(rank) for rank in body.ranks))


def _each(items, fields, i):
    return tuple(replace(item, **{name: value(item, i) for name, value in fields.items()}) for item in items)


def _regions(**fields):
    def lie(body, i):
        return _ranks(body, lambda rank: replace(rank, regions=_each(rank.regions, fields, i)))

    return lie


def _component(**fields):
    def lie(body, i):
        def change(rank):
            at = i % len(rank.components)
            false = replace(rank.components[at], **{name: value(rank, i) for name, value in fields.items()})
            return replace(rank, components=(*rank.components[:at], false, *rank.components[at + 1 :]))

        return _ranks(body, change)

    return lie


def _blocks(**fields):
    def lie(body, i):
        return replace(body, blocks=_each(body.blocks, fields, i))

    return lie


def _spans(**fields):
    def lie(body, i):
        return replace(body, axes=tuple(replace(axis, spans=_each(axis.spans, fields, i)) for axis in body.axes))

    return lie


LIES = {
    "the memory is elsewhere": _regions(base=lambda region, i: region.base + (1 << 40) * (1 + i)),
    "the memory is at 4096": _regions(base=lambda region, i: 4096 * (1 + i)),
    "past the address space": _regions(base=lambda region, i: (1 << 63) - 100),
    "more blocks than there can be": _regions(num_blocks=lambda region, i: 1 << 60),
    "no blocks": _regions(num_blocks=lambda region, i: 0),
    "a stride below the block": _regions(block_stride_bytes=lambda region, i: 1 + i),
    "behind its block": _component(base_bytes=lambda rank, i: rank.regions[0].block_stride_bytes + i),
    "before its block": _component(base_bytes=lambda rank, i: -1 - i),
    "a region that is not there": _component(region=lambda rank, i: len(rank.regions) + i),
    "a layer that is not there": _component(layer=lambda rank, i: 1000 + i),
    "a block that is not there": _component(block=lambda rank, i: 1000 + i),
    "axes that are not there": _blocks(axes=lambda block, i: (1000 + i,)),
    "atoms that are too large": _blocks(atom_bytes=lambda block, i: block.atom_bytes * (2 + i)),
    "blocks of so many tokens": _blocks(tokens_per_block=lambda block, i: 1 << (20 + i % 20)),
    "atoms that reach beyond": _spans(offset_bytes=lambda span, i: span.offset_bytes + (1 << 20)),
    "atoms on top of each other": _spans(stride_bytes=lambda span, i: 0),
    "spans without an end": _spans(stop=lambda span, i: 1 << 60),
    "the same rank twice": lambda body, i: replace(body, ranks=(body.ranks[0],) * len(body.ranks)),
    "a rank too few": lambda body, i: replace(body, ranks=body.ranks[:-1]),
    "components of nobody": lambda body, i: _ranks(body, lambda rank: replace(rank, components=rank.components[1:])),
}
"""By what is false; the number tells repetitions apart."""
