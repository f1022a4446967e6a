"""Moves descriptors between processes; knows no layout and no axis. Carriers: memory (reference), nixl, cma."""

from kvplan.transport.base import Batch, Device, Direction, Handle, MemoryRange, Progress, State, Transport
from kvplan.transport.checked import CheckedTransport
from kvplan.transport.ranges import RangeTable
from kvplan.transport.registry import add_transport, create, known_transports

__all__ = [
    "Batch",
    "CheckedTransport",
    "Device",
    "Direction",
    "Handle",
    "MemoryRange",
    "Progress",
    "RangeTable",
    "State",
    "Transport",
    "add_transport",
    "create",
    "known_transports",
]
