"""What stops two engines from exchanging cache: every differing field, with both values. No plan is made.

Coordinates are global, so both sides must speak of the same ones: per layer and component, the element type, the axes
and how far each reaches over all ranks. Everything else (TP, PP, DCP, block sizes, orders, packing) may differ. A plan
alone would not notice a source with more heads than the destination: it would move the first few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvplan.errors import Mismatch
from kvplan.layouts.sliding_window import SlidingWindowSpec
from kvplan.planner.layout import TOKEN, element_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.layouts.engine import EngineSpec
    from kvplan.planner import BlockLayout, EngineLayout

    Key = tuple[str, str]

SAME_MODEL = "both engines must serve the same model"
ONE_DTYPE = "formats are never converted: give both engines one element type (cache.dtype, conv_dtype, ssm_dtype)"
SCALES = "both engines keep scales, or neither (cache.scales); beside or inside may differ"
DRAFT = f"{SAME_MODEL}; a draft model's layers are marked draft: true"

AXIS_FIELDS = {"kv_head": "num_kv_heads", "state_head": "num_heads", "channel": "channels", "width": "conv_kernel"}
ROW_FIELDS = {"k": "head_dim", "v": "head_dim", "latent": "latent_dim", "indexer": "head_dim", "ssm": "state elements"}
ROW_OF_BYTES = "fp8_ds_mla"
"""Counts bytes, not elements: such a row's length says nothing about another type's."""


class _Difference(NamedTuple):
    """One field of one component."""

    field: str
    ours: str
    theirs: str
    advice: str


def differences(source: EngineLayout, destination: EngineLayout) -> tuple[Mismatch, ...]:
    """Return every field that stops an exchange; ``ours`` is the source's value, ``theirs`` the destination's."""
    ours, theirs = _components(source), _components(destination)
    found: dict[_Difference, list[Key]] = {}
    for key in ours:
        if key in theirs:
            for item in _component(key[1], ours[key], theirs[key]):
                found.setdefault(item, []).append(key)
    alike = [Mismatch(f"{x.field} ({_where(keys)})", x.ours, x.theirs, x.advice) for x, keys in found.items()]
    return (*_missing(source, destination), *alike)


def window_differences(source: EngineSpec, destination: EngineSpec) -> tuple[Mismatch, ...]:
    """Return sliding windows that differ; layouts do not show them. One side may keep every token of a window layer."""
    theirs = {layer.name: layer.window for layer in destination.layers if isinstance(layer, SlidingWindowSpec)}
    found: dict[tuple[int, int], list[str]] = {}
    for layer in source.layers:
        if isinstance(layer, SlidingWindowSpec) and theirs.get(layer.name, layer.window) != layer.window:
            found.setdefault((layer.window, theirs[layer.name]), []).append(layer.name)
    return tuple(Mismatch(f"window ({_layers_text(x)})", str(a), str(b), SAME_MODEL) for (a, b), x in found.items())


def model_differences(source: EngineSpec, destination: EngineSpec) -> tuple[Mismatch, ...]:
    """Return what two models' configs say differently: equal geometry does not make them one model.

    A key that one config leaves out is not compared, because its default is the model code's.
    """
    theirs = dict(destination.identity)
    return tuple(
        Mismatch(f"model.{key}", value, theirs[key], SAME_MODEL)
        for key, value in source.identity
        if theirs.get(key, value) != value
    )


def _missing(source: EngineLayout, destination: EngineLayout) -> Iterator[Mismatch]:
    """Yield what one side lacks and must have: whole layers first, then single components."""
    sides = (source, destination)
    needed = [_ordered(engine, optional=False) for engine in sides]
    held = [_ordered(engine, optional=True) for engine in sides]
    for side in (0, 1):
        values = ("present", "missing") if side == 0 else ("missing", "present")
        there = dict.fromkeys(layer for layer, _ in held[1 - side])
        lacking = [key for key in needed[side] if key not in held[1 - side]]
        layers = dict.fromkeys(layer for layer, _ in lacking if layer not in there)
        if layers:
            yield Mismatch(_layers_text(list(layers)), *values, DRAFT)
        parts: dict[str, list[str]] = {}
        for layer, component in lacking:
            if layer in there:
                parts.setdefault(component, []).append(layer)
        for component, names in parts.items():
            advice = SCALES if component.endswith("_scale") else SAME_MODEL
            yield Mismatch(f"component {component} ({_layers_text(names)})", *values, advice)


def _ordered(engine: EngineLayout, *, optional: bool) -> dict[Key, None]:
    return dict.fromkeys(item.key for rank in engine.ranks for item in rank.components if optional or not item.optional)


def _where(keys: list[Key]) -> str:
    """Return the components and layers of some keys in words: ``k, v of 80 layers, first model.layers.0.attn``."""
    components = ", ".join(dict.fromkeys(component for _, component in keys))
    return f"{components} of {_layers_text(list(dict.fromkeys(layer for layer, _ in keys)))}"


def _layers_text(layers: list[str]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers, first {layers[0]}"


def _components(engine: EngineLayout) -> dict[Key, list[BlockLayout]]:
    found: dict[Key, list[BlockLayout]] = {}
    for rank in engine.ranks:
        for item in rank.components:
            found.setdefault(item.key, []).append(item.block)
    return found


def _component(component: str, ours: list[BlockLayout], theirs: list[BlockLayout]) -> Iterator[_Difference]:
    (our_type, our_size, _), (their_type, their_size, _) = _element(ours[0]), _element(theirs[0])
    if (our_type, our_size) != (their_type, their_size):
        sizes = (f" ({our_size} bytes)", f" ({their_size} bytes)") if our_type == their_type else ("", "")
        yield _Difference("dtype", our_type + sizes[0], their_type + sizes[1], ONE_DTYPE)
    if (ours[0].tokens_per_block is None) != (theirs[0].tokens_per_block is None):
        mine, yours = ("state" if x[0].tokens_per_block is None else "tokens" for x in (ours, theirs))
        yield _Difference("kind", mine, yours, SAME_MODEL)
        return
    our_reach, their_reach = _reach(component, ours), _reach(component, theirs)
    mixed = ROW_OF_BYTES in {our_type, their_type} and our_type != their_type
    for name in dict.fromkeys((*our_reach, *their_reach)):
        if mixed and name == ROW_FIELDS.get(component):
            continue
        a, b = (side.get(name, "none") for side in (our_reach, their_reach))
        if a != b:
            yield _Difference(name, a, b, SAME_MODEL)


def _element(block: BlockLayout) -> tuple[str, int, int]:
    dtype, count, size = element_bytes(block.format, block.atom_bytes)
    return dtype, size, count


def _reach(component: str, blocks: list[BlockLayout]) -> dict[str, str]:
    """Return how far each axis but the token's reaches over all ranks, by the name that a description gives it.

    An atom's elements and a ``head_dim`` axis are two ways to say one row.
    """
    found: dict[str, tuple[int, int]] = {}
    for block in {id(block): block for block in blocks}.values():
        for axis in block.axes:
            if axis.name != TOKEN:
                low, high = found.get(axis.name, (axis.spans[0].start, axis.spans[-1].stop))
                found[axis.name] = (min(low, axis.spans[0].start), max(high, axis.spans[-1].stop))
    low, high = found.pop("head_dim", (0, 1))
    row = ROW_FIELDS.get(component, "elements of an atom")
    return {AXIS_FIELDS.get(name, name): _size(name, *ends) for name, ends in sorted(found.items())} | {
        row: str(_element(blocks[0])[2] * (high - low))
    }


def _size(axis: str, low: int, high: int) -> str:
    """Return an axis's extent as a description says it; intervals that do not begin at 0 are shown whole."""
    if axis == "width" and high == 0:
        return str(1 - low)
    return str(high) if low == 0 else f"[{low}, {high})"
