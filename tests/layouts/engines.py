"""Small engines and requests for tests: one line each."""

from __future__ import annotations

from kvplan.layouts import AddressSpace, CacheGeometry, EngineSpec, Parallel, engine_layout
from kvplan.planner import BlockTable, bind, plan_engines

PARALLEL = {"tp", "pp", "dcp", "dcp_interleave", "pp_layers"}


def engine(name, layers, *, space, num_layers=None, **knobs):
    parallel = {key: knobs.pop(key) for key in PARALLEL & knobs.keys()}
    spec = EngineSpec(
        engine_id=name,
        layers=tuple(layers),
        num_layers=num_layers or len(layers),
        parallel=Parallel(**parallel),
        cache=CacheGeometry(**knobs),
    )
    return engine_layout(spec, space)


def pair(layers, source, destination, *, destination_layers=None, num_layers=None):
    """Return both layouts of engines that hold the same layers."""
    space = AddressSpace()
    return (
        engine("p", layers, space=space, num_layers=num_layers, **source),
        engine("d", destination_layers or layers, space=space, num_layers=num_layers, **destination),
    )


def moved(plan, source, destination, num_tokens):
    """Return {(source rank, destination rank): [(source address, destination address, bytes)]}, one table per group."""
    tables = [[BlockTable(*table) for table in side] for side in (source, destination)]
    found = {}
    for own in plan.pairs:
        runs = bind(own, *tables, num_tokens=num_tokens, whole_blocks=False)
        columns = (runs.source_address.tolist(), runs.destination_address.tolist(), runs.num_bytes.tolist())
        found[own.source_rank, own.destination_rank] = sorted(zip(*columns, strict=True))
    return found


def planned(*args, **kwargs):
    source, destination = pair(*args, **kwargs)
    return plan_engines(source, destination)
