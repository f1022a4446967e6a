"""The planner: coordinates and bytes. Declarations in, plans out; nothing here knows a model, a process or a wire."""

from kvplan.planner.layout import BlockLayout, ComponentLayout, EngineLayout, RankLayout, Region
from kvplan.planner.span import Axis, Span

__all__ = [
    "Axis",
    "BlockLayout",
    "ComponentLayout",
    "EngineLayout",
    "RankLayout",
    "Region",
    "Span",
]
