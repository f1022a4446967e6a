"""Binding one read to its blocks: plans and tables in, pieces out. Nothing is posted, nothing is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import BindError
from kvplan.planner import Descriptors, bind
from kvplan.session.reads import Piece
from kvplan.session.routing import Terms
from kvplan.transport.cost import cost_model

if TYPE_CHECKING:
    from kvplan.planner import PairPlan, RankLayout
    from kvplan.session.config import SessionConfig
    from kvplan.session.nouns import ReadRequest
    from kvplan.session.reads import Source
    from kvplan.session.routing import Route
    from kvplan.transport.cost import CostModel

MAX_TOKENS = 1 << 27
"""Most tokens of one request: what a peer names must not decide how much memory we take."""


def check_devices(rank: RankLayout) -> str:
    """Return the one device of a rank's regions; raises ``BindError`` when there are several."""
    devices = sorted({region.device for region in rank.regions}) or ["cpu"]
    if len(devices) > 1:
        raise BindError(f"the regions of one rank lie on several devices: {', '.join(devices)}")
    return devices[0]


def configured_cost(transport: str, config: SessionConfig) -> CostModel:
    """Return the cost model of a session. Raises ``DescriptionError`` for a calibration file that is not one."""
    return cost_model(
        transport,
        file=config.calibration_file,
        descriptor_s=config.descriptor_us * 1e-6,
        bytes_per_s=config.read_gbps * 1e9,
        scatter_run_s=config.scatter_run_us * 1e-6,
        scatter_bytes_per_s=config.scatter_gbps * 1e9,
    )


def staging_terms(remote: RankLayout, local: RankLayout, config: SessionConfig) -> Terms:
    """Return what may be staged between two ranks: nothing unless both are in host memory."""
    on_host = check_devices(remote) == check_devices(local) == "cpu"
    return Terms(
        source_bases=np.array([region.base for region in remote.regions], np.int64),
        slot_bytes=config.slot_bytes if on_host else 0,
        run_bytes=config.staging_threshold_bytes,
        read_bytes=config.staging_read_bytes,
        gap_bytes=config.staging_gap_bytes,
        chunk_bytes=config.staging_chunk_bytes,
    )


def bound_runs(plan: PairPlan, request: ReadRequest, config: SessionConfig) -> Descriptors:
    """Return the runs of one request between one pair of ranks. Raises ``BindError``."""
    remote = request.remote
    if not 0 < remote.num_tokens <= MAX_TOKENS:
        raise BindError(f"num_tokens is {remote.num_tokens}; it must be in [1, {MAX_TOKENS}]")
    return bind(plan, remote.tables, request.tables, num_tokens=remote.num_tokens, whole_blocks=config.whole_blocks)


def pieces_of(source: Source, peer: str, way: Route, config: SessionConfig) -> list[Piece]:
    """Return the pieces of a route: staged ones first, so that they are scattered while the others are read."""
    staged = [Piece(source, peer, chunk.reads, chunk.scatter) for chunk in way.staged]
    return staged + [
        Piece(source, peer, _cut(way.straight, part)) for part in sliced(way.straight, config.max_post_bytes)
    ]


def sliced(descriptors: Descriptors, max_bytes: int) -> list[slice]:
    """Return slices of descriptors of at most ``max_bytes`` each; a longer single one stands alone.

    >>> from types import SimpleNamespace
    >>> sliced(SimpleNamespace(num_bytes=np.array([4, 4, 4, 9, 1], np.uint64)), 8)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    ends = np.cumsum(descriptors.num_bytes.astype(np.int64))
    slices, first = [], 0
    while first < len(ends):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + max_bytes, side="right")))
        slices.append(slice(first, last))
        first = last
    return slices


def _cut(runs: Descriptors, part: slice) -> Descriptors:
    return Descriptors(runs.source_address[part], runs.destination_address[part], runs.num_bytes[part])
