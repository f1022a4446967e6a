"""Gathers against piece by piece: blocks in any order, ragged ends, odd strides, steps that go back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.transport.gather import Columns

MEMORY = np.random.default_rng(5).integers(0, 256, 1 << 18, dtype=np.uint8)


def one_by_one(origin, place, num_bytes):
    rows = [[MEMORY[o + p : o + p + num_bytes] for p in place.tolist()] for o in origin.tolist()]
    return np.array([np.concatenate(row) for row in rows])


@st.composite
def places(draw):
    """Columns as blocks lay them out: runs of some step in blocks of any order, the ends ragged."""
    block, step = draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 8, 24, 261, -24]))
    first, count = draw(st.integers(0, block - 1)), draw(st.integers(1, 60))
    ids = draw(st.sampled_from([np.arange(70), np.random.default_rng(1).permutation(70), np.arange(70)[::-1]]))
    stride = draw(st.sampled_from([block * abs(step), 1009]))
    token = np.arange(first, first + count)
    return (ids[token // block] * stride + token % block * step).astype(np.int64) + 12 * 261


@settings(max_examples=300, deadline=None)
@given(places(), st.lists(st.integers(0, 3000), min_size=1, max_size=5), st.sampled_from([1, 2, 3, 4, 8, 24, 256]))
def test_every_piece_is_where_it_belongs(place, origin, num_bytes):
    origin = np.array(origin, np.int64)
    have = Columns(place, num_bytes).gather(origin + MEMORY.ctypes.data)
    assert have.tolist() == one_by_one(origin, place, num_bytes).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=80))
def test_places_without_any_order_are_gathered_singly(place):
    place, origin = np.array(place, np.int64), np.array([0, 77], np.int64)
    assert Columns(place, 16).gather(origin + MEMORY.ctypes.data).tolist() == one_by_one(origin, place, 16).tolist()


@pytest.mark.parametrize("rows, columns", [(0, 3), (2, 0), (0, 0)])
def test_nothing_is_gathered_from_nowhere(rows, columns):
    assert Columns(np.zeros(columns, np.int64), 8).gather(np.zeros(rows, np.int64)).shape == (rows, 8 * columns)
