"""Nouns: devices, ranges and batches refuse what contradicts itself, and say where."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.errors import DescriptorError, TransportError
from kvplan.transport import Batch, Device, Direction, Handle, MemoryRange, State
from kvplan.transport.base import CPU

TOP = 1 << 64


def batch(local, remote, num_bytes, **options):
    return Batch("p", *map(_array, (local, remote, num_bytes)), **options)


def _array(values):
    """Return an array; numpy makes floats of a list that holds numbers from 2^63 on, unless it is told."""
    huge = any(isinstance(v, int) and v >= TOP // 2 for v in values)
    return np.array(values, dtype=np.uint64 if huge else None)


@pytest.mark.parametrize(
    "text, device", [("cpu", CPU), ("cpu:0", CPU), ("cuda", Device("cuda", 0)), ("cuda:13", Device("cuda", 13))]
)
def test_device_parses(text, device):
    assert Device.parse(text) == device
    assert Device.parse(str(device)) == device


@pytest.mark.parametrize("text", ["", "cuda:", "cuda:-1", "CUDA:1", "cuda:1:2", "cuda:99999", "cuda:1\n", ":1"])
def test_device_refuses(text):
    with pytest.raises(DescriptorError, match="device"):
        Device.parse(text)


@pytest.mark.parametrize("address, num_bytes", [(0, 0), (8, -1), (-1, 4), (TOP - 4, 5), (TOP, 1)])
def test_range_refuses(address, num_bytes):
    with pytest.raises(DescriptorError, match="memory range"):
        MemoryRange(address, num_bytes)


def test_range_may_end_at_the_top():
    assert MemoryRange(TOP - 4, 4).num_bytes == 4


@pytest.mark.parametrize(
    "a, b, overlaps",
    [((0, 8), (8, 8), False), ((0, 9), (8, 8), True), ((8, 8), (0, 8), False), ((0, 64), (8, 1), True)],
)
def test_ranges_overlap(a, b, overlaps):
    assert MemoryRange(*a).overlaps(MemoryRange(*b)) is overlaps
    assert MemoryRange(*b).overlaps(MemoryRange(*a)) is overlaps
    assert not MemoryRange(*a).overlaps(MemoryRange(*b, Device("cuda", 0)))


def test_batch_is_canonical():
    made = batch([5, 1], np.array([7, 9], dtype=np.int32), (1, 2))
    assert [a.dtype for a in (made.local_address, made.remote_address, made.num_bytes)] == [np.uint64] * 3
    assert len(made) == 2
    assert made.total_bytes == 3
    with pytest.raises(ValueError, match="read-only"):
        made.num_bytes[0] = 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.peer = "q"


def test_batch_leaves_the_callers_array_writeable():
    mine = np.array([4], dtype=np.uint64)
    made = batch(mine, [0], [1])
    mine[0] = 8
    assert not made.local_address.flags.writeable


@pytest.mark.parametrize(
    "arrays, options, words",
    [
        pytest.param(([0], [0, 1], [1]), {}, "1 local addresses, 2 remote addresses, 1 lengths", id="lengths"),
        pytest.param(([0, 8, 16], [0, 8, 16], [8, 8, 0]), {}, "descriptor 2 has 0 bytes", id="zero"),
        pytest.param(([0, TOP - 8], [0, 8], [8, 9]), {}, "descriptor 1: local address", id="local-overflow"),
        pytest.param(([0, 8], [TOP - 1, 8], [2, 1]), {}, "descriptor 0: remote address", id="remote-overflow"),
        pytest.param(([0], [0], [TOP - 1]), {"direction": Direction.READ}, None, id="whole-space-is-no-overflow"),
        pytest.param(([32, 0, 31], [0, 8, 16], [8, 8, 2]), {}, "descriptor 2 writes local address 0x20", id="overlap"),
        pytest.param(([0, 8], [4, 4], [8, 8]), {"direction": Direction.WRITE}, "remote address 0x4", id="write-twice"),
        pytest.param(([0, 8], [4, 4], [8, 8]), {}, None, id="read-one-source-twice"),
        pytest.param(([4, 4], [0, 8], [8, 8]), {"direction": Direction.WRITE}, None, id="write-one-source-twice"),
        pytest.param(([[0]], [0], [1]), {}, "2 dimensions", id="dimensions"),
        pytest.param((["a"], [0], [1]), {}, "dtype", id="text"),
        pytest.param(([0], [True], [1]), {}, "dtype bool", id="bool"),
        pytest.param(([0], [0], [-3]), {}, r"num_bytes\[0\] is -3", id="negative"),
    ],
)
def test_batch_checks(arrays, options, words):
    if words is None:
        assert len(batch(*arrays, **options)) == len(arrays[0])
        return
    with pytest.raises(DescriptorError, match=words) as caught:
        batch(*arrays, **options)
    assert isinstance(caught.value, TransportError)
    assert isinstance(caught.value, ValueError)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=9))
def test_overlap_is_what_counting_bytes_says(rows):
    written = [x for start, length in rows for x in range(start, start + length)]
    arrays = [start for start, _ in rows], [0] * len(rows), [length for _, length in rows]
    if len(set(written)) == len(written):
        batch(*arrays)
    else:
        with pytest.raises(DescriptorError, match="writes local address"):
            batch(*arrays)


def test_handle_begins_pending():
    handle = Handle("p", 4)
    assert not handle.is_terminal
    assert handle.progress.state is State.PENDING
    assert "pending" in repr(handle)
