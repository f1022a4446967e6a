"""Two targets become one proved plan, or a reason why not. Shared by the commands; prints nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.errors import CompatibilityError
from kvplan.layouts.compare import differences, model_differences, window_differences
from kvplan.planner import bind, plan_engines
from kvplan.wire.compatibility import mismatches as fact_differences

if TYPE_CHECKING:
    from kvplan.cli.engine_file import Target
    from kvplan.cli.request_file import Request
    from kvplan.errors import Mismatch
    from kvplan.planner import Descriptors, EnginePlan


def proved_plan(source: Target, destination: Target) -> EnginePlan:
    """Return the plan of two engines. Raises CompatibilityError or PlanError when they cannot exchange cache."""
    found = mismatches(source, destination)
    if found:
        raise CompatibilityError(found)
    return plan_engines(source.layout, destination.layout)


def mismatches(source: Target, destination: Target) -> tuple[Mismatch, ...]:
    """Return every field that stops an exchange."""
    found = differences(source.layout, destination.layout)
    if source.facts and destination.facts:
        found = (*fact_differences(source.facts, destination.facts), *found)
    if source.spec is None or destination.spec is None:
        return found
    models = model_differences(source.spec, destination.spec)
    return (*models, *found, *window_differences(source.spec, destination.spec))


def bound_pairs(plan: EnginePlan, request: Request, *, require_cover: bool) -> list[tuple[int, int, Descriptors]]:
    """Return (source rank, destination rank, descriptors) of every pair, cut exactly at the request's last token."""
    return [
        (
            pair.source_rank,
            pair.destination_rank,
            bind(
                pair,
                request.source,
                request.destination,
                num_tokens=request.num_tokens,
                whole_blocks=False,
                require_cover=require_cover,
            ),
        )
        for pair in plan.pairs
    ]
