"""What one CMA transport tells another: who it is and what it registered. Encoding and checks only.

JSON, so that nothing is executed and a person can read it; every number is checked before it is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvplan.errors import TransportError
from kvplan.transport.base import ADDRESS_SPACE_BYTES, MemoryRange
from kvplan.transport.cma_syscalls import Process

_PREFIX = b"kvplan-cma-1\n"
NONCE_BYTES = 16
_MAX_RANGES = 1 << 16


@dataclass(frozen=True, slots=True)
class CmaMetadata:
    """A process, the proof of its identity and its registered ranges."""

    process: Process
    nonce: bytes
    """Random bytes that lie at ``nonce_address`` for as long as the transport is open."""
    nonce_address: int
    ranges: tuple[MemoryRange, ...]

    def encode(self) -> bytes:
        """Return the bytes that `decode` takes."""
        process = self.process
        return (
            _PREFIX
            + json.dumps(
                {
                    "boot": process.boot,
                    "namespace": process.namespace,
                    "pid": process.pid,
                    "start_ticks": process.start_ticks,
                    "nonce": self.nonce.hex(),
                    "nonce_address": self.nonce_address,
                    "ranges": [(r.address, r.num_bytes) for r in self.ranges],
                }
            ).encode()
        )

    @classmethod
    def decode(cls, peer: str, metadata: bytes) -> CmaMetadata:
        """Return what ``metadata`` says; raises TransportError for anything that `encode` cannot have made."""
        if not metadata.startswith(_PREFIX):
            raise TransportError(f"metadata of peer {peer!r} is not of the cma transport", peer=peer)
        try:
            fields = json.loads(metadata[len(_PREFIX) :])
            nonce = bytes.fromhex(fields["nonce"])
            ranges = tuple(MemoryRange(_natural(a), _natural(n)) for a, n in fields["ranges"])
            process = Process(
                _text(fields["boot"]),
                _text(fields["namespace"]),
                _natural(fields["pid"]),
                _natural(fields["start_ticks"]),
            )
            nonce_address = _natural(fields["nonce_address"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TransportError(f"metadata of peer {peer!r} is damaged: {error!r}", peer=peer) from error
        if len(nonce) != NONCE_BYTES or len(ranges) > _MAX_RANGES or not 0 < process.pid < 1 << 31:
            raise TransportError(f"metadata of peer {peer!r} is out of bounds (pid, nonce or ranges)", peer=peer)
        return cls(process, nonce, nonce_address, ranges)


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < ADDRESS_SPACE_BYTES:
        raise ValueError(f"{value!r} is not a number in [0, 2^64)")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
