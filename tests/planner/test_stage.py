"""Staging moves the same bytes as the direct runs, through an area of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.errors import BindError
from kvplan.planner import BlockTable, Descriptors, Region, bind, plan_engines, stage
from kvplan.testing.oracle import UNTOUCHED, Memory, check_moved, write_coordinates
from kvplan.testing.strategies import Shape, engine
from kvplan.transport.local import copy_runs

STAGING = 1 << 50


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    parallel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    area=st.integers(200, 5000),
    gap=st.integers(0, 600),
    limit=st.integers(64, 5000),
)
def test_staged_bytes_equal_direct_bytes(parallel: tuple[int, int], area: int, gap: int, limit: int) -> None:
    source = engine("p", Shape(parallel[0], 6, 3, "NHD", "packed"), 12, num_layers=2, num_blocks=5, base=4096)
    destination = engine("d", Shape(parallel[1], 4, 4, "HND", "split"), 12, num_layers=2, num_blocks=7, base=1 << 40)
    s, d = BlockTable(0, (4, 0, 3)), BlockTable(4, (6, 1, 2, 0))
    plan = plan_engines(source, destination)
    here, there = [Memory(r) for r in source.ranks], [Memory(r) for r in destination.ranks]
    for memory in here:
        write_coordinates(memory, [s])
    for pair in plan.pairs:
        runs = bind(pair, [s], [d], num_tokens=17, whole_blocks=False)
        rank = source.ranks[pair.source_rank]
        chunks = stage(runs, rank.regions, staging_address=STAGING, staging_bytes=area, gap_bytes=gap,
                       max_read_bytes=limit)  # fmt: skip
        scratch = _Scratch(area)
        for chunk in chunks:
            assert int(chunk.reads.num_bytes.max()) <= max(limit, int(runs.num_bytes.max()))
            scratch.fill(chunk.reads, here[pair.source_rank])
            scratch.empty(chunk.scatter, there[pair.destination_rank])
        assert sum(chunk.scatter.total_bytes for chunk in chunks) == runs.total_bytes
    for memory in there:
        check_moved(memory, [d], lambda token: token is not None and 4 <= token < 17)


class _Scratch:
    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.full(num_bytes, UNTOUCHED, np.uint8)

    def fill(self, reads: Descriptors, source: Memory) -> None:
        self.bytes[:] = UNTOUCHED
        for s, d, n in _rows(reads):
            assert d >= STAGING
            assert d + n <= STAGING + len(self.bytes)
            self.bytes[d - STAGING : d - STAGING + n] = source.view(s, n)

    def empty(self, scatter: Descriptors, destination: Memory) -> None:
        for s, d, n in _rows(scatter):
            destination.view(d, n)[:] = self.bytes[s - STAGING : s - STAGING + n]


def _rows(runs: Descriptors) -> list[tuple[int, int, int]]:
    columns = (runs.source_address, runs.destination_address, runs.num_bytes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_run_larger_than_the_area_is_refused_with_both_sizes() -> None:
    runs = Descriptors(*(np.array([n], np.uint64) for n in (4096, 8192, 100)))
    with pytest.raises(BindError, match="100 bytes does not fit into a staging area of 64"):
        stage(runs, [Region(4096, 1, 100)], staging_address=STAGING, staging_bytes=64, gap_bytes=0, max_read_bytes=64)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 8, 16, 64, 100, 2048, 4000]), min_size=1, max_size=40),
    seed=st.integers(0, 1 << 16),
    align=st.sampled_from([1, 2, 8]),
)
def test_copy_runs_copies_exactly_the_runs(sizes: list[int], seed: int, align: int) -> None:
    rng = np.random.default_rng(seed)
    step = 4096 + align
    here = rng.integers(0, 256, step * len(sizes), dtype=np.uint8)
    there = np.full_like(here, UNTOUCHED)
    expected = there.copy()
    places = rng.permutation(len(sizes)) * step
    for i, n in enumerate(sizes):
        expected[places[i] : places[i] + n] = here[i * step : i * step + n]
    source = np.arange(len(sizes), dtype=np.uint64) * np.uint64(step) + np.uint64(here.ctypes.data)
    destination = places.astype(np.uint64) + np.uint64(there.ctypes.data)
    copy_runs(source, destination, np.array(sizes, np.uint64))
    assert (there == expected).all()
