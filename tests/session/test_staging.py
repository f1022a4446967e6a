"""The staging area by itself: slots, and memory that outlives whoever took it."""

import gc
import weakref

import pytest

from kvplan.errors import SessionError
from kvplan.session import SessionConfig
from kvplan.session.staging import StagingArea
from kvplan.transport.memory import MemoryTransport

CONFIG = SessionConfig(staging_bytes=1 << 16, staging_slots=2)


def test_slots_are_disjoint_and_bounded():
    area = StagingArea(transport=MemoryTransport(), config=CONFIG)
    assert (area.has_free, area.num_bytes) == (True, 0)
    slots = {area.take(), area.take()}
    assert slots == {0, 1}
    assert not area.has_free
    with pytest.raises(SessionError, match="no staging slot"):
        area.take()
    area.give_back(1)
    assert area.take() == 1


def test_staging_that_is_off_has_no_slot():
    assert not StagingArea(transport=MemoryTransport(), config=SessionConfig(staging_bytes=0)).has_free


def test_t35_memory_with_a_write_outstanding_outlives_its_session():
    transport = MemoryTransport()
    area = StagingArea(transport=transport, config=CONFIG)
    area.take()
    area.give_back(area.take())
    memory = weakref.ref(area._memory)
    transport.close()
    del area
    gc.collect()
    assert memory() is not None


def test_memory_without_a_write_outstanding_is_freed_with_its_session():
    area = StagingArea(transport=MemoryTransport(), config=CONFIG)
    area.give_back(area.take())
    memory = weakref.ref(area._memory)
    del area
    gc.collect()
    assert memory() is None
