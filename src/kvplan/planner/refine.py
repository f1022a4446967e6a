"""Atoms on common ground: an atom of many elements against an axis of single ones. No ranks, no addresses.

One side may declare ``bfloat16[128]`` as its atom, the other an axis of 128 coordinates whose atom is one
``bfloat16``. Both say the same bytes; the coarser atom is refined into that axis. Element types are never converted.
"""

from __future__ import annotations

from dataclasses import replace

from kvplan.errors import FormatMismatchError
from kvplan.planner.layout import BlockLayout, element_bytes
from kvplan.planner.span import Axis, Span


def common_atoms(blocks: list[BlockLayout]) -> list[BlockLayout]:
    """Return the layouts with equal axes names and equal atoms.

    Raises FormatMismatchError when element types, sizes or axes cannot be brought together.
    """
    finest = max(blocks, key=lambda block: (len(block.axes), -block.atom_bytes))
    return [block if _alike(block, finest) else _refined(block, finest) for block in blocks]


def _alike(block: BlockLayout, finest: BlockLayout) -> bool:
    return (
        block.atom_bytes == finest.atom_bytes
        and element_bytes(block.format, block.atom_bytes) == element_bytes(finest.format, finest.atom_bytes)
        and _names(block) == _names(finest)
    )


def _names(block: BlockLayout) -> list[str]:
    return [axis.name for axis in block.axes]


def _refined(block: BlockLayout, finest: BlockLayout) -> BlockLayout:
    dtype, count, size = element_bytes(block.format, block.atom_bytes)
    fine_dtype, fine_count, fine_size = element_bytes(finest.format, finest.atom_bytes)
    extra = [name for name in _names(finest) if name not in _names(block)]
    alien = [name for name in _names(block) if name not in _names(finest)]
    if (dtype, size) != (fine_dtype, fine_size):
        raise _mismatch(block, finest, "element types differ, and formats are never converted")
    if alien or len(extra) != 1 or count % fine_count:
        raise _mismatch(block, finest, f"axes {_names(block)} and {_names(finest)} cannot be brought together")
    axis = Axis(extra[0], (Span(0, count // fine_count, 0, finest.atom_bytes),))
    return replace(block, axes=(*block.axes, axis), atom_bytes=finest.atom_bytes, format=finest.format)


def _mismatch(block: BlockLayout, finest: BlockLayout, why: str) -> FormatMismatchError:
    sides = f"{block.format} ({block.atom_bytes} bytes) and {finest.format} ({finest.atom_bytes} bytes)"
    return FormatMismatchError(f"{sides}: {why}", source=block.format, destination=finest.format)
