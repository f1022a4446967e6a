"""The planner: coordinates and bytes. Declarations in, plans out; nothing here knows a model, a process or a wire.

Declare (``RankLayout``), plan (``plan_rank``), bind (``bind``): each step is one function and returns a value.
"""

from kvplan.planner.atom_table import AtomTable, atoms
from kvplan.planner.descriptors import Descriptors, bind
from kvplan.planner.election import Election
from kvplan.planner.layout import BlockLayout, ComponentLayout, EngineLayout, RankLayout, Region
from kvplan.planner.meeting import period_tokens
from kvplan.planner.plan import EnginePlan, PairPlan, PlanPart, elect, plan_engines, plan_rank
from kvplan.planner.span import Axis, Span
from kvplan.planner.staging import Extents, StagedChunk, extents, filled, stage
from kvplan.planner.summary import PlanSummary, summarise
from kvplan.planner.tables import HOLE, BlockTable

__all__ = [
    "HOLE",
    "AtomTable",
    "Axis",
    "BlockLayout",
    "BlockTable",
    "ComponentLayout",
    "Descriptors",
    "Election",
    "EngineLayout",
    "EnginePlan",
    "Extents",
    "PairPlan",
    "PlanPart",
    "PlanSummary",
    "RankLayout",
    "Region",
    "Span",
    "StagedChunk",
    "atoms",
    "bind",
    "elect",
    "extents",
    "filled",
    "period_tokens",
    "plan_engines",
    "plan_rank",
    "stage",
    "summarise",
]
