"""Plans between described ranks and carries the runs out in this process's memory."""

import ctypes

from kvplan.planner import EngineLayout, bind, plan_rank


def move(source_ranks, destination_ranks, source_tables, destination_tables, *, num_tokens, whole_blocks=True):
    """Copy one request's cache from the source's ranks to all of the destination's; return the bytes moved."""
    source, destination = EngineLayout("p", tuple(source_ranks)), EngineLayout("d", tuple(destination_ranks))
    total = 0
    for rank in range(len(destination_ranks)):
        for plan in plan_rank(source, destination, rank):
            runs = bind(plan, source_tables, destination_tables, num_tokens=num_tokens, whole_blocks=whole_blocks)
            for to, start, count in zip(
                runs.destination_address.tolist(), runs.source_address.tolist(), runs.num_bytes.tolist(), strict=True
            ):
                ctypes.memmove(to, start, count)
            total += runs.total_bytes
    return total
