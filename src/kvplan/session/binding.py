"""Binding one read to its blocks: plans and tables in, pieces out. Nothing is posted, nothing is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import BindError
from kvplan.planner import Descriptors, bind, stage
from kvplan.session.reads import Piece

if TYPE_CHECKING:
    from kvplan.planner import PairPlan, RankLayout
    from kvplan.session.config import SessionConfig
    from kvplan.session.nouns import ReadRequest
    from kvplan.session.reads import Source

MAX_TOKENS = 1 << 27
"""Most tokens of one request: what a peer names must not decide how much memory we take."""
WORTHWHILE = 2
"""Staging must save at least this factor of descriptors."""


def check_devices(rank: RankLayout) -> str:
    """Return the one device of a rank's regions; raises ``BindError`` when there are several."""
    devices = sorted({region.device for region in rank.regions}) or ["cpu"]
    if len(devices) > 1:
        raise BindError(f"the regions of one rank lie on several devices: {', '.join(devices)}")
    return devices[0]


def is_fine(plan: PairPlan, remote: RankLayout, local: RankLayout, config: SessionConfig) -> bool:
    """Return whether a plan's runs are so short that they should pass through the staging area."""
    on_host = check_devices(remote) == check_devices(local) == "cpu"
    return on_host and config.staging_bytes > 0 and plan.summary().median_run < config.staging_threshold_bytes


def bound_runs(plan: PairPlan, request: ReadRequest, config: SessionConfig) -> Descriptors:
    """Return the runs of one request between one pair of ranks. Raises ``BindError``."""
    remote = request.remote
    if not 0 < remote.num_tokens <= MAX_TOKENS:
        raise BindError(f"num_tokens is {remote.num_tokens}; it must be in [1, {MAX_TOKENS}]")
    return bind(plan, remote.tables, request.tables, num_tokens=remote.num_tokens, whole_blocks=config.whole_blocks)


def pieces_of(source: Source, peer: str, runs: Descriptors, config: SessionConfig) -> list[Piece]:
    """Return the pieces that read the runs straight into their blocks."""
    slices = sliced(runs, config.max_post_bytes)
    return [Piece(source, peer, _cut(runs, part)) for part in slices]


def staged_pieces(
    source: Source, peer: str, runs: Descriptors, remote: RankLayout, slot_bytes: int, config: SessionConfig
) -> list[Piece]:
    """Return the pieces that read the runs through staging slots, or straight where that saves too little."""
    if not len(runs) or int(runs.num_bytes.max()) > slot_bytes:
        return pieces_of(source, peer, runs, config)
    chunks = stage(
        runs,
        remote.regions,
        staging_address=0,
        staging_bytes=slot_bytes,
        gap_bytes=config.staging_gap_bytes,
        max_read_bytes=min(config.staging_read_bytes, slot_bytes),
    )
    if sum(len(chunk.reads) for chunk in chunks) * WORTHWHILE > len(runs):
        return pieces_of(source, peer, runs, config)
    return [Piece(source, peer, chunk.reads, chunk.scatter) for chunk in chunks]


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
