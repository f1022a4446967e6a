"""From an engine's description to its layout: every layer of every rank, placed in regions. No kind of layer.

1. Cut the layers into pipeline stages; draft layers live on the last one.
2. Ask each layer for its pages on that rank (``attention.py``, ``mla.py``, ``mamba2.py``, ...).
3. Arrange the pages in regions (``arrange.py``) and repeat them over kernel blocks and tokens (``page.py``).
4. Give each region an address. Addresses are made up for a dry run; one :class:`AddressSpace` for both sides keeps them
   disjoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from kvplan.errors import DescriptionError
from kvplan.layouts.arrange import arrange
from kvplan.layouts.attention import AttentionSpec
from kvplan.layouts.gdn import GdnSpec
from kvplan.layouts.geometry import CacheGeometry
from kvplan.layouts.indexer import IndexerSpec
from kvplan.layouts.mamba1 import Mamba1Spec
from kvplan.layouts.mamba2 import Mamba2Spec
from kvplan.layouts.mla import LatentSpec
from kvplan.layouts.page import block_shape, place_part
from kvplan.layouts.parallel import Parallel
from kvplan.planner import ComponentLayout, EngineLayout, RankLayout, Region

if TYPE_CHECKING:
    from kvplan.layouts.page import Page
    from kvplan.layouts.parallel import Place

LayerSpec: TypeAlias = AttentionSpec | LatentSpec | IndexerSpec | Mamba1Spec | Mamba2Spec | GdnSpec
"""Any kind of layer; sliding windows are attention."""

STATE_KINDS = ("mamba1", "mamba2", "gdn")

_SAME_COMPONENTS = {"sliding_window": "attention"} | dict.fromkeys(STATE_KINDS, "state")

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])(\d+)(?![A-Za-z0-9_])")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine, as a person describes it."""

    engine_id: str
    layers: tuple[LayerSpec, ...]
    num_layers: int
    """Decoder layers of the model, those without a cache included: what pipeline stages divide."""
    parallel: Parallel = field(default_factory=Parallel)
    cache: CacheGeometry = field(default_factory=CacheGeometry)
    model: str = ""
    """What the model is called, for messages; empty when unknown."""
    identity: tuple[tuple[str, str], ...] = ()
    """What else its Hugging Face config says, (key, value); empty for explicit layers."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise DescriptionError("the model has no layer with a cache", field="model.layers")
        self._check_names()
        self._check_groups()
        self._check_stages()

    def _check_names(self) -> None:
        """Refuse a name that two layers of one kind share; a latent and its indexer may have one name."""
        seen: set[tuple[str, str]] = set()
        for layer in self.layers:
            key = (layer.name, _SAME_COMPONENTS.get(layer.kind, layer.kind))
            if key in seen:
                raise DescriptionError(f"layer {layer.name!r} is named twice", field="model.layers")
            seen.add(key)

    def _check_groups(self) -> None:
        found = sorted({layer.group for layer in self.layers})
        if found != list(range(len(found))):
            raise DescriptionError(f"groups are {found}; they count from 0 without gaps", field="model.layers.group")
        unknown = sorted({item.group for item in self.cache.groups} - set(found))
        if unknown:
            raise DescriptionError(
                f"groups {unknown} have no layers; the model has groups {found}", field="cache.groups"
            )
        for group in found:
            kinds = {layer.kind for layer in self.layers if layer.group == group}
            if kinds & set(STATE_KINDS) and not kinds <= set(STATE_KINDS):
                raise DescriptionError(
                    f"group {group} mixes {', '.join(sorted(kinds))}; a block table names tokens or state",
                    field="model.layers.group",
                )

    def _check_stages(self) -> None:
        if self.parallel.pp > self.num_layers:
            raise DescriptionError(
                f"pp is {self.parallel.pp}, the model has {self.num_layers} layers; a stage has at least one",
                field="parallel.pp",
            )
        for layer in self.layers:
            if not layer.draft and decoder_index(layer) >= self.num_layers:
                raise DescriptionError(
                    f"layer {layer.name!r} is decoder layer {decoder_index(layer)}, the model has {self.num_layers}",
                    field="model.num_layers",
                )
        if self.parallel.pp > 1:
            nameless = next((layer for layer in self.layers if not layer.draft and _number(layer) is None), None)
            if nameless is not None:
                raise DescriptionError(
                    f"layer {nameless.name!r} has no number in its name, and pp is {self.parallel.pp}; give its index",
                    field="model.layers.index",
                )

    @property
    def num_groups(self) -> int:
        """KV cache groups, each with its own block table."""
        return max(layer.group for layer in self.layers) + 1

    def stage_layers(self, pp_rank: int) -> tuple[LayerSpec, ...]:
        """Return the layers with a cache that one stage holds."""
        stage = self.parallel.stages(self.num_layers)[pp_rank]
        last = pp_rank == self.parallel.pp - 1
        return tuple(layer for layer in self.layers if (last if layer.draft else decoder_index(layer) in stage))


ADDRESS_LIMIT = 1 << 63
"""One past the highest address that the planner takes."""


class AddressSpace:
    """Hands out made-up addresses: disjoint, aligned, ascending. Memory is never touched."""

    def __init__(self, start: int = 4096, alignment: int = 4096) -> None:
        self._next = start
        self._alignment = alignment

    def take(self, num_bytes: int) -> int:
        """Return the first address of a range that nobody else has."""
        address = self._next
        if address + num_bytes > ADDRESS_LIMIT:
            raise DescriptionError(
                f"regions of {num_bytes} bytes do not fit 63 bits of addresses; lower num_blocks",
                field="cache.num_blocks",
            )
        self._next += -(-num_bytes // self._alignment) * self._alignment
        return address


def engine_layout(spec: EngineSpec, addresses: AddressSpace | None = None) -> EngineLayout:
    """Return the layout of all ranks of an engine, stage by stage and in each by TP rank.

    >>> layer = AttentionSpec(name="model.layers.0.self_attn", num_kv_heads=2, head_dim=128)
    >>> layout = engine_layout(EngineSpec(engine_id="p", layers=(layer,), num_layers=1, parallel=Parallel(tp=2)))
    >>> [rank.component("model.layers.0.self_attn", "k").block.axis("kv_head").spans[0].start for rank in layout.ranks]
    [0, 1]
    """
    space = addresses or AddressSpace()
    return EngineLayout(spec.engine_id, tuple(_rank_layout(spec, place, space) for place in spec.parallel.places()))


def layer_pages(layer: LayerSpec, place: Place, cache: CacheGeometry) -> tuple[Page, ...]:
    """Return what a layer keeps in one kernel block, given its group's geometry; equal layers share one answer."""
    return _pages(replace(layer, name="", group=0, index=None, draft=False), place, cache)


def decoder_index(layer: LayerSpec) -> int:
    """Return the decoder layer that a layer's cache belongs to; 0 when its name has no number."""
    return _number(layer) or 0


def _number(layer: LayerSpec) -> int | None:
    if layer.index is not None:
        return layer.index
    match = _NUMBER.search(layer.name)
    return int(match[1]) if match else None


def _rank_layout(spec: EngineSpec, place: Place, space: AddressSpace) -> RankLayout:
    layers = spec.stage_layers(place.pp_rank)
    geometry = {group: spec.cache.of_group(group) for group in sorted({layer.group for layer in layers})}
    pages = tuple(layer_pages(layer, place, geometry[layer.group]) for layer in layers)
    groups = tuple(layer.group for layer in layers)
    kernels = {group: cache.num_kernel_blocks for group, cache in geometry.items()}
    arranged, strides = arrange(pages, groups, kernels, spec.cache)
    shapes = {group: block_shape(cache, spec.parallel, place) for group, cache in geometry.items()}
    components = tuple(
        ComponentLayout(
            layer=layers[item.layer].name,
            component=part.component,
            group=groups[item.layer],
            region=item.region,
            block=_placed(
                part,
                shapes[groups[item.layer]],
                base_bytes=item.base_bytes,
                kernel_stride_bytes=item.kernel_stride_bytes,
            ),
            optional=layers[item.layer].draft,
        )
        for item in arranged
        for part in pages[item.layer][item.page].parts
    )
    device = "cpu" if spec.cache.device == "cpu" else f"{spec.cache.device}:{place.tp_rank}"
    count = spec.cache.num_blocks
    regions = tuple(Region(space.take(count * stride), count, stride, device) for stride in strides)
    return RankLayout(regions, components, tp=place.tp_rank, pp=place.pp_rank, dcp=place.dcp_rank)


@lru_cache(maxsize=1024)
def _pages(layer: LayerSpec, place: Place, cache: CacheGeometry) -> tuple[Page, ...]:
    return layer.pages(place, cache)


_placed = lru_cache(maxsize=4096)(place_part)
