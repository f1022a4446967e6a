"""What kvplan offers at its front door. Implementations live in the rooms below it.

The whole model in one sentence: each rank declares which coordinates of the cache lie at which bytes of a block; a
plan is the intersection of two declarations; a transport moves it.

Here: the declarations and plans (``kvplan.planner``) and the names that people of this field look for
(``kvplan.layouts``). Moving bytes: ``kvplan.transport``. One engine's part in every exchange: ``kvplan.session``.
"""

from kvplan.layouts import (
    EngineTransferInfo,
    EngineTransferPlan,
    MambaConvSplitInfo,
    ReadSpec,
    TPMapping,
    TransferTopology,
    compute_tp_mapping,
    generate_engine_transfer_plan,
    logical_to_kernel_block_ids,
    register_remote_engine,
)
from kvplan.planner import (
    Axis,
    BlockLayout,
    BlockTable,
    ComponentLayout,
    Descriptors,
    Election,
    EngineLayout,
    EnginePlan,
    PairPlan,
    RankLayout,
    Region,
    Span,
    bind,
    elect,
    plan_engines,
    plan_rank,
    stage,
)
from kvplan.version import __version__

__all__ = [
    "Axis",
    "BlockLayout",
    "BlockTable",
    "ComponentLayout",
    "Descriptors",
    "Election",
    "EngineLayout",
    "EnginePlan",
    "EngineTransferInfo",
    "EngineTransferPlan",
    "MambaConvSplitInfo",
    "PairPlan",
    "RankLayout",
    "ReadSpec",
    "Region",
    "Span",
    "TPMapping",
    "TransferTopology",
    "__version__",
    "bind",
    "compute_tp_mapping",
    "elect",
    "generate_engine_transfer_plan",
    "logical_to_kernel_block_ids",
    "plan_engines",
    "plan_rank",
    "register_remote_engine",
    "stage",
]
