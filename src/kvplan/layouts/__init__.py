"""Layouts: the only room that knows models and parallelism. Returns rank and engine layouts; no plans, no memory."""

from kvplan.layouts.attention import AttentionSpec
from kvplan.layouts.engine import AddressSpace, EngineSpec, LayerSpec, engine_layout
from kvplan.layouts.gdn import GdnSpec
from kvplan.layouts.geometry import CacheGeometry, GroupGeometry
from kvplan.layouts.indexer import IndexerSpec
from kvplan.layouts.mamba1 import Mamba1Spec
from kvplan.layouts.mamba2 import Mamba2Spec
from kvplan.layouts.mla import LatentSpec
from kvplan.layouts.parallel import Parallel, Place
from kvplan.layouts.sliding_window import SlidingWindowSpec

__all__ = [
    "AddressSpace",
    "AttentionSpec",
    "CacheGeometry",
    "EngineSpec",
    "GdnSpec",
    "GroupGeometry",
    "IndexerSpec",
    "LatentSpec",
    "LayerSpec",
    "Mamba1Spec",
    "Mamba2Spec",
    "Parallel",
    "Place",
    "SlidingWindowSpec",
    "engine_layout",
]
