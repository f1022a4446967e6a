"""The shipped conformance suite, run on every carrier. Peers of nixl and cma are real second processes."""

import importlib.util

import pytest

from kvplan.testing.processes import LocalPeer, PeerProcess
from kvplan.testing.transport_conformance import TransportConformance
from kvplan.transport import create


class TestMemory(TransportConformance):
    def make_transport(self):
        return create("memory")

    def make_peer(self, *sizes, seed=1):
        return LocalPeer("memory", sizes=sizes, seed=seed)


class TestCma(TransportConformance):
    def make_transport(self):
        return create("cma")

    def make_peer(self, *sizes, seed=1):
        return PeerProcess("cma", sizes=sizes, seed=seed)


class TestCmaInSmallTurns(TransportConformance):
    """1,000 bytes a turn: nearly every batch is copied by many polls. The peer is another transport of this process."""

    def make_transport(self):
        return create("cma", max_batch_bytes=1_000)

    def make_peer(self, *sizes, seed=1):
        return LocalPeer("cma", sizes=sizes, seed=seed)


@pytest.mark.nixl
@pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="needs the package nixl-cu12")
class TestNixl(TransportConformance):
    def make_transport(self):
        return create("nixl")

    def make_peer(self, *sizes, seed=1):
        return PeerProcess("nixl", sizes=sizes, seed=seed)
