"""Everything that touches NIXL's own objects lives here: loading, the agent, one request; no policy does.

NIXL 1.5.1's Python class ``nixl_agent`` sets the progress thread's delay to 0 (``_api.py``, ``pthrDelay``), which
burns one core per idle agent. The bindings below it (``_bindings.nixlAgent``, ``nixlAgentConfig``) are public,
are what that class is made of, and take the delay; so they are used directly, and nothing of NIXL is patched.
Its descriptor serialisation (pickle) and its notifications are not used.

Measured facts that this file defends against (NIXL 1.5.1, UCX backend):

* releasing a request twice, or posting it after its release, is a segmentation fault: `NixlRequest` owns the
  state of a request, in one table;
* releasing a request in flight does not cancel it: the table does not allow it;
* after a load that failed half-way, the same agent's good metadata is refused too (``nixlInvalidParamError``),
  and nothing but a new agent of ours clears it: damage is found by a checksum before NIXL sees the bytes;
* errors are twelve unrelated classes under ``Exception``: `translate` is the only place that knows them.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.errors import IllegalTransitionError, NotRegisteredError, PeerGoneError, TransportError, UnsupportedError
from kvplan.transport.base import Batch, Direction, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvplan.transport.base import Device, MemoryRange

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl_rocm", "nixl")
_SEGMENTS = {"cpu": "DRAM_SEG", "cuda": "VRAM_SEG"}

_REASONS: Mapping[str, tuple[type[TransportError], str]] = {
    "nixlBackendError": (TransportError, "the UCX backend failed"),
    "nixlCancelledError": (TransportError, "the transfer was cancelled"),
    "nixlInvalidParamError": (TransportError, "NIXL found a parameter invalid"),
    "nixlMismatchError": (TransportError, "the metadata is not NIXL's, or of another NIXL version"),
    "nixlNoTelemetryError": (TransportError, "NIXL has no telemetry"),
    "nixlNotAllowedError": (TransportError, "NIXL does not allow it now; the agent may be known already"),
    "nixlNotFoundError": (
        NotRegisteredError,
        "outside the peer's registered memory, on another device, across two ranges, or the agent is unknown",
    ),
    "nixlNotPostedError": (TransportError, "the request was not posted"),
    "nixlNotSupportedError": (TransportError, "the UCX backend does not support it"),
    "nixlRemoteDisconnectError": (PeerGoneError, "the peer's process ended or closed the connection"),
    "nixlRepostActiveError": (TransportError, "the request is in flight already"),
    "nixlUnknownError": (TransportError, "NIXL gave no reason"),
}


def load_bindings() -> Any:
    """Return NIXL's bindings module; one that this process has loaded already is preferred.

    UCX prints to standard output unless told otherwise; its log is sent to standard error, as a default that
    ``UCX_LOG_FILE`` overrides. NIXL's import switches ``logging.raiseExceptions`` off for the whole process;
    that is undone.
    """
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    loaded = [p for p in _PACKAGES if f"{p}._bindings" in sys.modules]
    raise_exceptions = logging.raiseExceptions
    try:
        for package in (*loaded, *_PACKAGES):
            try:
                return import_module(f"{package}._bindings")
            except ModuleNotFoundError as error:
                if error.name not in {package, f"{package}._bindings"}:
                    raise UnsupportedError(f"package {package} needs {error.name}, which is not installed") from error
            except ImportError as error:
                raise UnsupportedError(f"package {package} is installed but does not load: {error}") from error
    finally:
        logging.raiseExceptions = raise_exceptions
    raise UnsupportedError(
        "transport 'nixl' needs the package nixl-cu12 (or nixl-cu13), which is not installed: "
        "pip install 'kvplan[nixl]', after a torch build for your machine"
    )


@contextmanager
def translate(action: str, *, peer: str = "") -> Iterator[None]:
    """Turn whatever NIXL raises in the block into our TransportError, with the reason in words."""
    try:
        yield
    except (TransportError, IllegalTransitionError):
        raise
    except Exception as error:
        name = type(error).__name__
        kind, reason = _REASONS.get(name, (TransportError, "unexpected"))
        where = f" (peer {peer!r})" if peer else ""
        raise kind(f"{action}{where}: {reason} [{name}: {error}]", peer=peer) from error


class _Life(Enum):
    CREATED = "created"
    IN_FLIGHT = "in flight"
    ENDED = "ended"
    RELEASED = "released"


_MOVES = {
    (_Life.CREATED, _Life.IN_FLIGHT),
    (_Life.IN_FLIGHT, _Life.ENDED),
    (_Life.ENDED, _Life.RELEASED),
    (_Life.CREATED, _Life.RELEASED),
}


class NixlAgent:
    """One NIXL agent with its backends (UCX, usually) and one progress thread that sleeps between looks."""

    def __init__(
        self, name: str, *, progress_delay_us: int, ucx_tls: str | None, num_threads: int, backends: Sequence[str]
    ) -> None:
        self._bindings = load_bindings()
        self.name = name
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = progress_delay_us
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_STRICT
        with translate("starting NIXL"), _environment({"UCX_TLS": ucx_tls} if ucx_tls else {}):
            self._agent = self._bindings.nixlAgent(name, config)
            for backend in backends:
                threads = {"num_threads": str(num_threads)} if backend == "UCX" and num_threads else {}
                self._agent.createBackend(backend, threads)

    def register(self, ranges: Sequence[MemoryRange]) -> list[Any]:
        """Register ``ranges`` and return what `deregister` needs."""
        lists = []
        for kind in dict.fromkeys(r.device.kind for r in ranges):
            rows = [(r.address, r.num_bytes, r.device.index, "") for r in ranges if r.device.kind == kind]
            with translate(f"registering {len(rows)} ranges of {kind} memory"):
                listed = self._bindings.nixlRegDList(self._segment(kind), rows)
                self._agent.registerMem(listed, [])
            lists.append(listed)
        return lists

    def deregister(self, lists: Sequence[Any]) -> None:
        """Undo `register`. Peers that hold our metadata can still read; NIXL has no revocation."""
        for listed in lists:
            with translate("deregistering memory"):
                self._agent.deregisterMem(listed, [])

    def metadata(self) -> bytes:
        """Return NIXL's own metadata: connection info and registered ranges."""
        with translate("reading our metadata"):
            return bytes(self._agent.getLocalMD())

    def load(self, blob: bytes, *, peer: str) -> str:
        """Make the agent that ``blob`` describes known and return its name."""
        with translate("loading metadata", peer=peer):
            return bytes(self._agent.loadRemoteMD(blob)).decode(errors="replace")

    def forget(self, agent: str, *, peer: str) -> None:
        """Make ``agent`` unknown."""
        with translate("forgetting an agent", peer=peer):
            self._agent.invalidateRemoteMD(agent)

    def request(self, batch: Batch, agent: str) -> NixlRequest:
        """Return a request for ``batch`` that has not been posted. NIXL looks up every address here."""
        operation = "NIXL_READ" if batch.direction is Direction.READ else "NIXL_WRITE"
        with translate(f"preparing {len(batch)} descriptors", peer=batch.peer):
            native = self._agent.createXferReq(
                getattr(self._bindings, operation),
                self._list(batch.local_device, batch.local_address, batch.num_bytes),
                self._list(batch.remote_device, batch.remote_address, batch.num_bytes),
                agent,
                "",
                [],
            )
        return NixlRequest(self._agent, self._bindings, int(native), batch.peer)

    def _list(self, device: Device, address: NDArray[np.uint64], num_bytes: NDArray[np.uint64]) -> Any:
        rows = np.empty((len(address), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = address, num_bytes, device.index
        return self._bindings.nixlXferDList(self._segment(device.kind), rows)

    def _segment(self, kind: str) -> Any:
        if kind not in _SEGMENTS:
            raise NotRegisteredError(f"NIXL moves {' and '.join(_SEGMENTS)} memory, not {kind}")
        return getattr(self._bindings, _SEGMENTS[kind])


class NixlRequest:
    """One transfer request. Its native handle is posted once and released once, and never in flight."""

    __slots__ = ("_agent", "_bindings", "_life", "_native", "_peer")

    def __init__(self, agent: Any, bindings: Any, native: int, peer: str) -> None:
        self._agent = agent
        self._bindings = bindings
        self._native = native
        self._peer = peer
        self._life = _Life.CREATED

    def start(self) -> State:
        """Post it. Over shared memory and CMA this copies everything before it returns, without the GIL."""
        self._advance(_Life.IN_FLIGHT)
        return self._state(self._agent.postXferReq, self._native, "")

    def check(self) -> State:
        """Return how far it is; raises TransportError, and is over, when it failed."""
        if self._life is not _Life.IN_FLIGHT:
            raise IllegalTransitionError(f"a request that is {self._life.value} cannot be checked")
        return self._state(self._agent.getXferStatus, self._native)

    def release(self) -> None:
        """Free the native handle; only of a request that is over, or was never posted."""
        self._advance(_Life.RELEASED)
        with translate("releasing a request", peer=self._peer):
            self._agent.releaseXferReq(self._native)

    def _state(self, call: Any, *arguments: Any) -> State:
        try:
            with translate("moving a batch", peer=self._peer):
                status = call(*arguments)
        except TransportError:
            self._advance(_Life.ENDED)
            raise
        if status == self._bindings.NIXL_IN_PROG:
            return State.PENDING
        self._advance(_Life.ENDED)
        if status != self._bindings.NIXL_SUCCESS:
            raise TransportError(f"moving a batch: NIXL says {status}", peer=self._peer)
        return State.DONE

    def _advance(self, to: _Life) -> None:
        if (self._life, to) not in _MOVES:
            raise IllegalTransitionError(f"a NIXL request that is {self._life.value} cannot become {to.value}")
        self._life = to


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the block only: UCX reads them while its context is made."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
