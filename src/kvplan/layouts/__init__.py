"""Layouts: the only room that knows models and parallelism. Returns rank and engine layouts; no plans, no memory."""

from kvplan.layouts.attention import AttentionSpec
from kvplan.layouts.conv_split import MambaConvSplitInfo
from kvplan.layouts.engine import AddressSpace, EngineSpec, LayerSpec, engine_layout
from kvplan.layouts.gdn import GdnSpec
from kvplan.layouts.geometry import CacheGeometry, GroupGeometry
from kvplan.layouts.indexer import IndexerSpec
from kvplan.layouts.kernel_blocks import logical_to_kernel_block_ids
from kvplan.layouts.mamba1 import Mamba1Spec
from kvplan.layouts.mamba2 import Mamba2Spec
from kvplan.layouts.mla import LatentSpec
from kvplan.layouts.parallel import Parallel, Place
from kvplan.layouts.sliding_window import SlidingWindowSpec
from kvplan.layouts.topology import EngineTransferInfo, TransferTopology, register_remote_engine
from kvplan.layouts.tp_mapping import TPMapping, compute_tp_mapping
from kvplan.layouts.transfer_plan import EngineTransferPlan, ReadSpec, generate_engine_transfer_plan

__all__ = [
    "AddressSpace",
    "AttentionSpec",
    "CacheGeometry",
    "EngineSpec",
    "EngineTransferInfo",
    "EngineTransferPlan",
    "GdnSpec",
    "GroupGeometry",
    "IndexerSpec",
    "LatentSpec",
    "LayerSpec",
    "Mamba1Spec",
    "Mamba2Spec",
    "MambaConvSplitInfo",
    "Parallel",
    "Place",
    "ReadSpec",
    "SlidingWindowSpec",
    "TPMapping",
    "TransferTopology",
    "compute_tp_mapping",
    "engine_layout",
    "generate_engine_transfer_plan",
    "logical_to_kernel_block_ids",
    "register_remote_engine",
]
