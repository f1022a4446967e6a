"""What the two halves of the connector tell each other through vLLM, as plain values. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

if TYPE_CHECKING:
    from kvplan.session import Offer, RankHello, ReadRequest, RemoteRef


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What one engine step asks of every rank's session; scheduler to worker."""

    offers: list[Offer] = field(default_factory=list)
    """Finished prefills whose blocks are kept for a reader."""
    reads: list[ReadRequest] = field(default_factory=list)
    """Requests that wait for their cache."""
    releases: list[RemoteRef] = field(default_factory=list)
    """References that will not be read: full local hit, abort, another request read them."""
    renewals: list[RemoteRef] = field(default_factory=list)
    """References whose leases should live on; given every heartbeat."""
    cancels: list[str] = field(default_factory=list)
    """Reads of requests that were aborted."""
    failures: dict[str, str] = field(default_factory=dict)
    """Requests that wait for a cache that cannot come, and why."""

    def __bool__(self) -> bool:
        return bool(self.offers or self.reads or self.releases or self.renewals or self.cancels or self.failures)


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """What one worker tells its scheduler once, after its caches are registered."""

    hello: RankHello
    compatibility: dict[str, str]
