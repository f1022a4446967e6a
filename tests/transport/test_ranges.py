"""The table of ranges against counting bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.errors import NotRegisteredError
from kvplan.transport import Device, MemoryRange, RangeTable
from kvplan.transport.base import CPU
from kvplan.transport.ranges import merge_overlapping

ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=6)


def arrays(rows):
    return [np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True)]


@settings(max_examples=300, deadline=None)
@given(ROWS, st.tuples(st.integers(0, 70), st.integers(1, 25)))
def test_inside_one_range_is_what_the_definition_says(ranges, descriptor):
    table = RangeTable([MemoryRange(a, n) for a, n in ranges])
    address, num_bytes = descriptor
    inside = any(a <= address and address + num_bytes <= a + n for a, n in ranges)
    assert table.find_outside(CPU, *arrays([descriptor])) == (None if inside else 0)


def test_first_descriptor_outside_is_named_with_its_values():
    table = RangeTable([MemoryRange(4096, 4096), MemoryRange(16384, 64)])
    with pytest.raises(
        NotRegisteredError, match=r"descriptor 2: local bytes \[0x1ff9, \+8\) on cpu.*2 registered"
    ) as e:
        table.check("local", "p", CPU, *arrays([(4096, 4096), (16384, 1), (8185, 8), (0, 1)]))
    assert e.value.peer == "p"


def test_devices_are_apart():
    table = RangeTable([MemoryRange(0, 64, Device("cuda", 1))])
    assert table.find_outside(Device("cuda", 1), *arrays([(0, 64)])) is None
    assert table.find_outside(Device("cuda", 0), *arrays([(0, 64)])) == 0
    assert table.find_outside(CPU, *arrays([(0, 64)])) == 0


def test_range_up_to_the_top_of_the_address_space():
    table = RangeTable([MemoryRange((1 << 64) - 16, 16)])
    assert table.find_outside(CPU, *arrays([((1 << 64) - 8, 8)])) is None
    assert table.find_outside(CPU, *arrays([((1 << 64) - 17, 8)])) == 0


def test_add_returns_what_is_new():
    table = RangeTable()
    a, b = MemoryRange(0, 8), MemoryRange(8, 8)
    assert table.add([a, a]) == (a,)
    assert table.add([a, b]) == (b,)
    assert (len(table), tuple(table)) == (2, (a, b))


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_merging_keeps_the_bytes_and_leaves_no_overlap(rows):
    ranges = [MemoryRange(a, n) for a, n in rows]
    merged = merge_overlapping(ranges)
    covered = [x for r in merged for x in range(r.address, r.address + r.num_bytes)]
    assert sorted(covered) == sorted({x for a, n in rows for x in range(a, a + n)})
    assert all(any(m.address <= r.address < m.address + m.num_bytes for m in merged) for r in ranges)
