"""The NIXL transport: descriptors of each batch go to NIXL's UCX backend as they are; merging is the caller's.

Per batch: two Nx3 arrays -> ``createXferReq`` -> ``postXferReq`` -> ``getXferStatus`` until terminal -> release.
Nothing per block is prepared at the handshake. What one has to know:

* A read over CMA or shared memory is synchronous: ``post`` copies, with the GIL released. Batches from about a thousand
  descriptors on are given to the backend's own threads, and ``post`` returns while they copy.
* Nothing cancels a transfer. A handle is released when NIXL says that it ended, never by a timeout; `close`
  with a batch in flight keeps the agent alive until the process ends, because its memory may still be written.
* Agent names are unique per transport, so a restarted peer is another agent.
* Metadata is checked for damage before NIXL's parser sees it. That is no authentication: take it from
  authenticated peers only.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import zlib
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from kvplan.errors import TransportError, UnsupportedError
from kvplan.transport.base import Batch, Handle, MemoryRange, State
from kvplan.transport.checked import CheckedTransport, finished
from kvplan.transport.nixl_binding import NixlAgent, NixlRequest
from kvplan.transport.ranges import merge_overlapping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_log = logging.getLogger(__name__)
_PREFIX = b"kvplan-nixl-1"
_CLOSE_POLL_S = 0.005
_ABANDONED: list[NixlTransport] = []
"""Transports that were closed with a batch in flight: freeing them could crash or free memory that is written."""


class NixlHandle(Handle):
    """A batch that was given to NIXL; ``request`` is None once it is released."""

    __slots__ = ("request",)

    def __init__(self, peer: str, num_bytes: int, request: NixlRequest) -> None:
        super().__init__(peer, num_bytes)
        self.request: NixlRequest | None = request


class NixlTransport(CheckedTransport):
    """Moves batches with NIXL 1.5 (package nixl-cu12), UCX backend, host and CUDA memory.

    ``progress_delay_us`` is how long the progress thread sleeps between looks: 10,000 costs 0.4% of an idle core.
    ``ucx_tls`` limits UCX to these transports (its variable UCX_TLS); None lets UCX and the environment decide.
    ``close_timeout_s`` bounds how long ``close`` waits for batches in flight.
    ``num_threads`` threads of the UCX backend share batches of very many descriptors, as vLLM's connector has it. The
    default 0 copies in ``post`` where the carrier is synchronous: NIXL 1.5.1 with threads was seen to abort the process
    when part of a shared batch failed.
    ``backends`` are NIXL backends by name; memory is registered with each, and NIXL chooses among them. Tested: UCX.
    """

    name: ClassVar[str] = "nixl"

    def __init__(
        self,
        *,
        progress_delay_us: int = 10_000,
        ucx_tls: str | None = None,
        close_timeout_s: float = 2.0,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
    ) -> None:
        super().__init__()
        if isinstance(backends, str) or not backends:
            raise UnsupportedError(f"backends is {backends!r}; give a list of names of NIXL backends, as ['UCX']")
        self._close_timeout_s = close_timeout_s
        self._agent: NixlAgent | None = NixlAgent(
            f"kvplan-{os.getpid()}-{secrets.token_hex(8)}",
            progress_delay_us=progress_delay_us,
            ucx_tls=ucx_tls,
            num_threads=num_threads,
            backends=backends,
        )
        self._registered: list[Any] = []
        self._agents: dict[str, str] = {}

    def _register(self, ranges: Sequence[MemoryRange]) -> None:
        merged = merge_overlapping(ranges)
        for item in merged:
            for old in self._ranges:
                if old.overlaps(item):
                    raise TransportError(
                        f"range at {item.address:#x} of {item.num_bytes} bytes overlaps the one at {old.address:#x} "
                        f"of {old.num_bytes} bytes, registered earlier; register overlapping ranges in one call"
                    )
        self._registered += self._require_agent().register(merged)

    def _metadata(self) -> bytes:
        agent = self._require_agent()
        blob = agent.metadata()
        return b"\n".join((_PREFIX, agent.name.encode(), b"%08x" % zlib.crc32(blob), blob))

    def _connect(self, peer: str, metadata: bytes) -> None:
        name, blob = _open_metadata(peer, metadata)
        agent = self._require_agent()
        if name == agent.name or name in self._agents.values():
            raise TransportError(f"peer {peer!r} is this transport itself, or connected under another name", peer=peer)
        try:
            loaded = agent.load(blob, peer=peer)
        except TransportError:
            self._forget(name, peer)
            raise
        if loaded != name:
            if loaded not in self._agents.values():
                self._forget(loaded, peer)
            raise TransportError(f"metadata of peer {peer!r} names agent {name!r} and {loaded!r}", peer=peer)
        self._agents[peer] = name

    def _disconnect(self, peer: str) -> None:
        name = self._agents.pop(peer, None)
        if name is not None:
            self._forget(name, peer)

    def _forget(self, agent: str, peer: str) -> None:
        try:
            self._require_agent().forget(agent, peer=peer)
        except TransportError as error:
            _log.debug("peer %s: %s", peer, error)

    def _post(self, batch: Batch) -> Handle:
        request = self._require_agent().request(batch, self._agents[batch.peer])
        handle = NixlHandle(batch.peer, batch.total_bytes, request)
        try:
            state = request.start()
        except TransportError:
            _release(handle)
            raise
        return _finish(handle, State.DONE) if state is State.DONE else handle

    def _poll(self, handle: Handle) -> None:
        if not isinstance(handle, NixlHandle) or handle.request is None:
            return
        try:
            state = handle.request.check()
        except TransportError as error:
            _finish(handle, State.FAILED, str(error))
        else:
            if state is State.DONE:
                _finish(handle, State.DONE)

    def _close(self) -> None:
        deadline = time.monotonic() + self._close_timeout_s
        while self._poll_all() and time.monotonic() < deadline:
            time.sleep(_CLOSE_POLL_S)
        agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._pending:
            _log.warning(
                "closed with %d batches in flight (peers %s): their memory may still be written",
                len(self._pending),
                ", ".join(sorted({h.peer for h in self._pending})),
            )
            self._agent = agent
            _ABANDONED.append(self)
            return
        for peer, name in self._agents.items():
            _quietly(partial(agent.forget, name, peer=peer))
        _quietly(partial(agent.deregister, self._registered))

    def _poll_all(self) -> bool:
        for handle in tuple(self._pending):
            self._poll(handle)
            self._settle(handle)
        return bool(self._pending)

    def _require_agent(self) -> NixlAgent:
        if self._agent is None:
            raise TransportError("the nixl transport is closed")
        return self._agent


def _open_metadata(peer: str, metadata: bytes) -> tuple[str, bytes]:
    """Return agent name and NIXL's blob; refuse what is not ours, or not whole."""
    parts = metadata.split(b"\n", 3)
    if len(parts) != 4 or parts[0] != _PREFIX:
        raise TransportError(f"metadata of peer {peer!r} is not of the nixl transport", peer=peer)
    _, name, checksum, blob = parts
    if checksum != b"%08x" % zlib.crc32(blob):
        raise TransportError(f"metadata of peer {peer!r} is damaged: its checksum does not fit", peer=peer)
    return name.decode("ascii", errors="replace"), blob


def _finish(handle: NixlHandle, state: State, reason: str = "") -> NixlHandle:
    _release(handle)
    finished(handle, state, reason)
    return handle


def _release(handle: NixlHandle) -> None:
    request, handle.request = handle.request, None
    if request is not None:
        _quietly(request.release)


def _quietly(action: Callable[[], None]) -> None:
    """Do something that ends a thing's life: that it fails is worth a log line, not an error."""
    try:
        action()
    except TransportError as error:
        _log.warning("%s", error)
