"""Transports by name, and what is said when there is none."""

import subprocess
import sys

import pytest

import kvplan.transport as room
from kvplan.errors import UnsupportedError
from kvplan.transport import create


def test_exports_are_sorted_and_there():
    assert list(room.__all__) == sorted(room.__all__)
    assert all(hasattr(room, name) for name in room.__all__)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match="unknown transport 'rdma'; known: cma, memory, nixl"):
        create("rdma")


def test_unknown_option_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match="no option colour; known options: max_batch_bytes, allow_any_tracer"):
        create("cma", colour="red")


def test_own_transport_can_be_added_once():
    """In its own process: the table of names is one per process."""
    program = """
from kvplan.errors import UnsupportedError
from kvplan.transport import add_transport, create, known_transports
from kvplan.transport.memory import MemoryTransport
add_transport("own", MemoryTransport)
print(known_transports(), create("own").name)
try:
    add_transport("memory", MemoryTransport)
except UnsupportedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "('cma', 'memory', 'nixl', 'own') memory",
        "a transport named 'memory' is known already",
    ]


def test_missing_package_is_named():
    program = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("nixl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
sys.meta_path.insert(0, Hide())
from kvplan.errors import UnsupportedError
from kvplan.transport import create
try:
    create("nixl")
except UnsupportedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "needs the package nixl-cu12" in done.stdout
    assert "pip install" in done.stdout


def test_room_imports_no_carrier_and_no_torch():
    program = "import sys, kvplan.transport; print({'nixl_cu12', 'torch', 'kvplan.transport.cma'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
