"""The JSON form of a plan, schema 1 (``docs/plan-json.md``). Layouts and copies in, plain values out; no planning.

Every value is a number, a text or a list of them, so that any language can check a plan without this library. A
component that the two sides declare with different atoms is written with the finer one on both, so that one key
(layer, component) has one format and the same axes everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplan.planner.layout import TOKEN
from kvplan.planner.refine import common_atoms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvplan.planner import Axis, BlockLayout, ComponentLayout, Descriptors, EngineLayout, RankLayout

    Bound = tuple[int, int, Descriptors]
    """(source rank, destination rank, what moves between them)."""
    Common = dict[int, BlockLayout]
    """Blocks by ``id`` of the declared one."""

SCHEMA = 1


def plan_json(source: EngineLayout, destination: EngineLayout, bound: Iterable[Bound]) -> dict[str, Any]:
    """Return the plan of one request as plain values."""
    pairs = list(bound)
    copies = [copy for pair in pairs for copy in _copies(*pair)]
    readers: dict[str, list[int]] = {str(rank): [] for rank in range(len(source.ranks))}
    for source_rank, destination_rank, moved in pairs:
        if len(moved):
            readers[str(source_rank)].append(destination_rank)
    common = _common(source, destination)
    return {
        "schema": SCHEMA,
        "source": engine_json(source, common),
        "destination": engine_json(destination, common),
        "copies": copies,
        "readers": {rank: sorted(set(who)) for rank, who in readers.items()},
    }


def _common(source: EngineLayout, destination: EngineLayout) -> Common:
    """Return the blocks that are written otherwise than declared, by identity."""
    blocks: dict[tuple[str, str], dict[int, BlockLayout]] = {}
    for rank in (*source.ranks, *destination.ranks):
        for item in rank.components:
            blocks.setdefault(item.key, {})[id(item.block)] = item.block
    mixed = [found for found in blocks.values() if len({block.format for block in found.values()}) > 1]
    return {i: fine for found in mixed for i, fine in zip(found, common_atoms(list(found.values())), strict=True)}


def engine_json(engine: EngineLayout, common: Common) -> dict[str, Any]:
    """Return one side's declarations."""
    return {"ranks": [_rank(rank, common) for rank in engine.ranks]}


def _rank(rank: RankLayout, common: Common) -> dict[str, Any]:
    regions = [
        {"base": x.base, "block_stride_bytes": x.block_stride_bytes, "num_blocks": x.num_blocks} for x in rank.regions
    ]
    components = [_component(item, common.get(id(item.block), item.block)) for item in rank.components]
    return {"tp": rank.tp, "pp": rank.pp, "dcp": rank.dcp, "regions": regions, "components": components}


def _component(item: ComponentLayout, block: BlockLayout) -> dict[str, Any]:
    axes = sorted(block.axes, key=lambda axis: (axis.name != TOKEN, axis.name))
    return {
        "layer": item.layer,
        "component": item.component,
        "group": item.group,
        "region": item.region,
        "base_bytes": block.base_bytes,
        "atom_bytes": block.atom_bytes,
        "format": block.format,
        "tokens_per_block": block.tokens_per_block,
        "axes": [_axis(axis) for axis in axes],
    }


def _axis(axis: Axis) -> dict[str, Any]:
    spans = [
        {"start": x.start, "stop": x.stop, "offset_bytes": x.offset_bytes, "stride_bytes": x.stride_bytes}
        for x in axis.spans
    ]
    return {"name": axis.name, "spans": spans}


def _copies(source_rank: int, destination_rank: int, moved: Descriptors) -> list[dict[str, int]]:
    columns = (moved.source_address.tolist(), moved.destination_address.tolist(), moved.num_bytes.tolist())
    return [
        {
            "source_rank": source_rank,
            "destination_rank": destination_rank,
            "source_address": source_address,
            "destination_address": destination_address,
            "num_bytes": num_bytes,
        }
        for source_address, destination_address, num_bytes in zip(*columns, strict=True)
    ]
