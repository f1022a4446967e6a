"""What stops two engines from exchanging cache: every differing field, with both values. No plan is made.

Coordinates are global, so both sides must speak of the same ones: per layer and component, the format, the axes and how
far each axis reaches over all ranks. Everything else (TP, PP, DCP, block sizes, orders, packing) may differ. A plan
alone would not notice a source with more heads than the destination: it would move the first few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.errors import Mismatch
from kvplan.planner.layout import TOKEN, element_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.planner import BlockLayout, EngineLayout

    Key = tuple[str, str]

_SAME_MODEL = "both engines must serve the same model"


def differences(source: EngineLayout, destination: EngineLayout) -> tuple[Mismatch, ...]:
    """Return every field that stops an exchange; ``ours`` is the source's value, ``theirs`` the destination's."""
    ours, theirs = _components(source), _components(destination)
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for key in ours.keys() & theirs.keys():
        for item in _component(key[1], ours[key], theirs[key]):
            found.setdefault((item.field, item.ours, item.theirs, item.advice), []).append(key[0])
    alike = [Mismatch(f"{field} ({_named(layers)})", a, b, advice) for (field, a, b, advice), layers in found.items()]
    return (*_missing(source, destination), *sorted(alike, key=lambda item: item.field))


def _missing(source: EngineLayout, destination: EngineLayout) -> Iterator[Mismatch]:
    """Yield what one side lacks and must have, component by component."""
    needed = [
        {item.key for rank in engine.ranks for item in rank.components if not item.optional}
        for engine in (source, destination)
    ]
    held = [{item.key for rank in engine.ranks for item in rank.components} for engine in (source, destination)]
    for side in (0, 1):
        lacking: dict[str, list[str]] = {}
        for layer, component in needed[side] - held[1 - side]:
            lacking.setdefault(component, []).append(layer)
        for component in sorted(lacking):
            named = _named(lacking[component])
            values = ("present", "missing") if side == 0 else ("missing", "present")
            yield Mismatch(f"component {component} ({named})", *values, _SAME_MODEL)


def _named(layers: list[str]) -> str:
    names = sorted(layers, key=_natural)
    return f"layer {names[0]}" if len(names) == 1 else f"{len(names)} layers, first {names[0]}"


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(x), "") if x.isdigit() else (1, 0, x) for x in name.split(".")]


def _components(engine: EngineLayout) -> dict[Key, list[BlockLayout]]:
    found: dict[Key, list[BlockLayout]] = {}
    for rank in engine.ranks:
        for item in rank.components:
            found.setdefault(item.key, []).append(item.block)
    return found


def _component(component: str, ours: list[BlockLayout], theirs: list[BlockLayout]) -> Iterator[Mismatch]:
    our_type, their_type = _element(ours[0]), _element(theirs[0])
    if our_type[:2] != their_type[:2]:
        mine, yours = (
            f"{x[0]} of {x[1]} bytes" if our_type[0] == their_type[0] else x[0] for x in (our_type, their_type)
        )
        advice = "formats are never converted; give both engines one cache dtype"
        yield Mismatch(f"{component} dtype", mine, yours, advice)
        return
    if (ours[0].tokens_per_block is None) != (theirs[0].tokens_per_block is None):
        mine, yours = ("state" if x[0].tokens_per_block is None else "tokens" for x in (ours, theirs))
        yield Mismatch(f"{component} kind", mine, yours, _SAME_MODEL)
        return
    our_reach, their_reach = _reach(ours), _reach(theirs)
    for name in sorted(our_reach.keys() | their_reach.keys()):
        a, b = (side.get(name, f"no axis {name}") for side in (our_reach, their_reach))
        if a != b:
            yield Mismatch(f"{component} {name}", a, b, _SAME_MODEL)


def _element(block: BlockLayout) -> tuple[str, int, int]:
    dtype, count, size = element_bytes(block.format, block.atom_bytes)
    return dtype, size, count


def _reach(blocks: list[BlockLayout]) -> dict[str, str]:
    """Return how far each axis reaches over all ranks, tokens apart; an atom's elements count as an axis of theirs."""
    found: dict[str, tuple[int, int]] = {}
    for block in blocks:
        for axis in block.axes:
            if axis.name != TOKEN:
                low, high = found.get(axis.name, (axis.spans[0].start, axis.spans[-1].stop))
                found[axis.name] = (min(low, axis.spans[0].start), max(high, axis.spans[-1].stop))
    elements = _element(blocks[0])[2]
    for low, high in [found.pop("head_dim", (0, 1))]:
        elements *= high - low
    reach = {name: f"[{low}, {high})" for name, (low, high) in found.items()}
    return reach | {"elements of a row": str(elements)}
