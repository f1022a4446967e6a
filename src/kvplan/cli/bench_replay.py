"""Replays one made-up request between two live engines: what a rank of D would read from P, this process reads.

1. The two layouts are planned and proved, as a handshake would.
2. For each rank of D, blocks of a request of so many tokens are bound: P's are where P's cache really lies, D's are in
   memory of this process that has the layout of D's rank.
3. What a session would post is posted and timed, straight or through staging and a local scatter.

The bytes that arrive are whatever P's blocks hold; nobody keeps them, and neither engine notices.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvplan.cli.bench_measure import wait_for
from kvplan.cli.pairs import mismatches
from kvplan.cli.sample import sample_request
from kvplan.errors import CompatibilityError, DescriptionError, UnsupportedError
from kvplan.planner import Descriptors, EngineLayout, RankLayout, StagedChunk, bind, plan_rank
from kvplan.session.binding import staging_terms
from kvplan.session.config import SessionConfig
from kvplan.session.routing import route
from kvplan.transport import Batch, Device
from kvplan.transport.cost import SCATTER, CostModel
from kvplan.transport.cost import Cost as MoveCost
from kvplan.transport.local import copy_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvplan.cli.bench_measure import Endpoint
    from kvplan.cli.calibration import Calibration
    from kvplan.cli.engine_file import Target
    from kvplan.cli.request_file import Request
    from kvplan.planner import BlockTable, PairPlan
    from kvplan.transport import Transport
    from kvplan.wire.messages import Hello

MAX_BYTES = 4 << 30
"""Largest memory that one rank's part of the request may take here."""
CONFIG = SessionConfig()


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank of D would read from one rank of P."""

    source_rank: int
    device: Device
    straight: tuple[Descriptors, ...] = ()
    chunks: tuple[StagedChunk, ...] = ()
    """Readings into staging and their scatters."""

    @property
    def peer(self) -> str:
        """What the transport calls that rank."""
        return f"peer/{self.source_rank}"


@dataclass(frozen=True, slots=True)
class Replay:
    """What one rank of D's reads cost."""

    destination_rank: int
    source_ranks: tuple[int, ...]
    num_bytes: int
    """Bytes that cross, gaps included."""
    num_descriptors: int
    staged: bool
    seconds: float
    """Median over the rounds."""
    predicted_s: float
    """What the cost model says."""


def replayable(source: Target, destination: Target, num_tokens: int) -> Request:
    """Return the request. Raises ``CompatibilityError``, and ``DescriptionError`` when there is no room for it."""
    found = mismatches(source, destination)
    if found:
        raise CompatibilityError(found)
    request = sample_request(source, destination, num_tokens)
    needed = _blocks_needed(request.source)
    held = min(region.num_blocks for rank in source.layout.ranks for region in rank.regions)
    if needed > held:
        raise DescriptionError(
            f"a request of {num_tokens} tokens in scattered blocks needs {needed} blocks, {source.name} has {held}; "
            "use fewer --tokens"
        )
    total = _bytes_needed(destination, _blocks_needed(request.destination))
    if total > MAX_BYTES:
        raise DescriptionError(f"{num_tokens} tokens take {total >> 20} MiB here; use fewer --tokens")
    return request


def replay(
    source: Target,
    destination: Target,
    hello: Hello,
    end: Endpoint,
    calibration: Calibration,
    *,
    request: Request,
    rounds: int,
    tick: Callable[[], None],
) -> list[Replay]:
    """Return what each rank of D's reads of a ``replayable`` request cost."""
    needed = _blocks_needed(request.destination)
    transport = end.transport
    buffer = end.buffer(_bytes_needed(destination, needed))
    staging = end.new_buffer(CONFIG.slot_bytes)
    cost = _model(calibration, transport.name)
    results = []
    for rank in range(len(destination.layout.ranks)):
        here = _at(destination.layout, rank, buffer, needed)
        plans = plan_rank(source.layout, here, rank)
        shares = [_share(plan, source.layout, here.ranks[rank], request, staging, cost) for plan in plans]
        _connect(transport, hello, shares)
        taken = []
        for _ in range(rounds + 1):
            began_at = time.perf_counter()
            _read(transport, shares)
            taken.append(time.perf_counter() - began_at)
            tick()
        results.append(_result(rank, shares, statistics.median(taken[1:]), calibration, transport.name))
    return results


def _blocks_needed(tables: Sequence[BlockTable]) -> int:
    return 1 + max((int(block) for table in tables for block in table.block_ids), default=0)


def _bytes_needed(target: Target, num_blocks: int) -> int:
    """Return the memory that the largest rank needs for so many blocks."""
    return num_blocks * max(sum(r.block_stride_bytes for r in rank.regions) for rank in target.layout.ranks)


def _at(layout: EngineLayout, rank: int, buffer: NDArray[np.uint8], num_blocks: int) -> EngineLayout:
    """Return the layout with one rank's regions in memory of this process, as long as the request needs."""
    regions, base = [], buffer.ctypes.data
    for region in layout.ranks[rank].regions:
        regions.append(replace(region, base=base, num_blocks=num_blocks, device="cpu"))
        base += num_blocks * region.block_stride_bytes
    own: RankLayout = replace(layout.ranks[rank], regions=tuple(regions))
    return EngineLayout(layout.engine_id, (*layout.ranks[:rank], own, *layout.ranks[rank + 1 :]))


def _share(
    plan: PairPlan,
    source: EngineLayout,
    local: RankLayout,
    request: Request,
    staging: NDArray[np.uint8],
    cost: CostModel,
) -> Share:
    """Return what a session would post for one pair of ranks."""
    remote = source.ranks[plan.source_rank]
    device = Device.parse(remote.regions[0].device)
    tables = (request.source, request.destination)
    runs = bind(plan, *tables, num_tokens=request.num_tokens, whole_blocks=True, require_cover=False)
    way = route(runs, cost, staging_terms(remote, local, CONFIG))
    chunks = tuple(_placed(chunk, staging.ctypes.data) for chunk in way.staged)
    return Share(plan.source_rank, device, (way.straight,) if len(way.straight) else (), chunks)


def _placed(chunk: StagedChunk, base: int) -> StagedChunk:
    """Return a chunk whose addresses in staging are absolute."""
    reads, scatter, at = chunk.reads, chunk.scatter, np.uint64(base)
    return StagedChunk(
        Descriptors(reads.source_address, reads.destination_address + at, reads.num_bytes),
        Descriptors(scatter.source_address + at, scatter.destination_address, scatter.num_bytes),
    )


def _model(calibration: Calibration, transport: str) -> CostModel:
    """Return the cost model of a session that uses this calibration."""
    read, scatter = calibration.transports[transport], calibration.scatter
    return CostModel(
        MoveCost(read.post_s, read.descriptor_s, read.bytes_per_s),
        MoveCost(scatter.post_s, scatter.descriptor_s, scatter.bytes_per_s) if scatter else SCATTER,
    )


def _connect(transport: Transport, hello: Hello, shares: Sequence[Share]) -> None:
    for share in shares:
        card = hello.ranks[share.source_rank]
        if card.transport != transport.name:
            raise UnsupportedError(f"rank {share.source_rank} uses {card.transport!r}, rank 0 {transport.name!r}")
        transport.connect(share.peer, card.metadata)


def _read(transport: Transport, shares: Sequence[Share]) -> None:
    """Move everything once: the straight batches at the same time, the staged ones chunk by chunk."""
    wait_for(transport, [_batch(share, runs) for share in shares for runs in share.straight])
    for share in shares:
        for chunk in share.chunks:
            wait_for(transport, [_batch(share, chunk.reads)])
            copy_runs(chunk.scatter.source_address, chunk.scatter.destination_address, chunk.scatter.num_bytes)


def _batch(share: Share, runs: Descriptors) -> Batch:
    arrays = (runs.destination_address, runs.source_address, runs.num_bytes)
    return Batch(share.peer, *arrays, remote_device=share.device)


def _result(rank: int, shares: Sequence[Share], seconds: float, calibration: Calibration, transport: str) -> Replay:
    cost, scatter = calibration.transports[transport], calibration.scatter
    reads = [runs for share in shares for runs in (*share.straight, *(chunk.reads for chunk in share.chunks))]
    copies = [chunk.scatter for share in shares for chunk in share.chunks]
    predicted_s = sum(cost.seconds(runs.total_bytes, len(runs)) for runs in reads)
    predicted_s += sum(scatter.seconds(runs.total_bytes, len(runs)) for runs in copies) if scatter else 0.0
    return Replay(
        destination_rank=rank,
        source_ranks=tuple(share.source_rank for share in shares),
        num_bytes=sum(runs.total_bytes for runs in reads),
        num_descriptors=sum(len(runs) for runs in reads),
        staged=bool(copies),
        seconds=seconds,
        predicted_s=predicted_s,
    )
