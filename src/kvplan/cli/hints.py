"""Hints of ``kvplan explain``: which setting makes runs short, and what would make them longer. No costs.

Runs are short where the two sides store the same coordinates in different orders, or where TP cuts an order whose rows
lie side by side. Both are settings of an engine, so both can be changed before machines are bought.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvplan.cli.engine_file import Target
    from kvplan.cli.flows import Flow

SHORT_RUN_BYTES = 4096
"""Runs from here on are left alone: a descriptor costs about as much as their bytes."""


def hints(source: Target, destination: Target, found: Sequence[Flow]) -> Iterator[str]:
    """Yield one sentence for each setting that would lengthen runs; none where runs are long."""
    if source.spec is None or destination.spec is None:
        return
    if all(flow.median_run >= SHORT_RUN_BYTES for flow in found):
        return
    ours, theirs = source.spec.cache, destination.spec.cache
    kinds = {layer.kind for layer in source.spec.layers}
    heads = bool(kinds & {"attention", "sliding_window"})
    if heads and ours.kv_layout != theirs.kv_layout:
        yield f"hint: kv_layout is {ours.kv_layout} and {theirs.kv_layout}; one layout on both sides moves longer runs"
    elif heads and ours.kv_layout == "NHD" and source.spec.parallel.tp != destination.spec.parallel.tp:
        yield "hint: under kv_layout NHD unequal TP cuts every token's row; HND on both sides moves longer runs"
    if kinds & {"mamba1", "mamba2", "gdn"} and ours.conv_layout != theirs.conv_layout:
        yield (
            f"hint: conv_layout is {ours.conv_layout} and {theirs.conv_layout}, so convolution state moves element by "
            "element; one layout on both sides moves longer runs"
        )
    shares = [(spec.parallel.dcp, spec.parallel.dcp_interleave) for spec in (source.spec, destination.spec)]
    if shares[0] != shares[1] and min(own[1] for own in shares if own[0] > 1) == 1:
        yield "hint: dcp_interleave 1 cuts every token apart; a larger interleave moves longer runs"
