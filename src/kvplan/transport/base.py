"""The nouns of a transport and its five verbs live here; no carrier, no bookkeeping and no layout does.

A transport moves descriptors: triples (local address, remote address, bytes). It never learns what the
bytes mean. One life of it, in order:

1. ``register`` the memory that may be read or written, ours and by peers.
2. ``metadata`` gives opaque bytes; the peer receives them over its own control channel.
3. ``connect`` takes a peer's metadata under a name that we choose.
4. ``post`` starts one batch and returns a handle; ``poll`` says PENDING, DONE or FAILED.
5. ``close`` ends it within a bound.

DONE and FAILED are terminal and mean that no byte of that batch is written any more. PENDING means that the
carrier may still write, whatever the caller has decided since: nothing can cancel it, so the caller keeps the
local memory untouched until the handle is terminal.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from kvplan.errors import DescriptorError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

ADDRESS_SPACE_BYTES = 1 << 64
_DEVICE = re.compile(r"([a-z]+)(?::(\d{1,4}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Device:
    """Where an address lives: ``Device("cpu")`` or ``Device("cuda", 1)``."""

    kind: str
    """``cpu`` or ``cuda``; a transport says which kinds it moves."""
    index: int = 0
    """Which one of its kind, 0 for the host."""

    @classmethod
    def parse(cls, text: str) -> Device:
        """Return the device that ``text`` names.

        >>> Device.parse("cuda:1")
        Device(kind='cuda', index=1)
        """
        match = _DEVICE.fullmatch(text)
        if match is None:
            raise DescriptorError(f"device {text!r} is not of the form 'cpu' or 'cuda:1'")
        return cls(match[1], int(match[2] or 0))

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" and self.index == 0 else f"{self.kind}:{self.index}"


CPU = Device("cpu", 0)


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """One contiguous piece of memory, ``[address, address + num_bytes)``."""

    address: int
    """First byte, a virtual address of the owning process."""
    num_bytes: int
    """Length, at least 1."""
    device: Device = CPU
    """Where it lives."""

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise DescriptorError(f"memory range at {self.address:#x} has {self.num_bytes} bytes; at least 1 is needed")
        if self.address < 0 or self.address + self.num_bytes > ADDRESS_SPACE_BYTES:
            raise DescriptorError(
                f"memory range at {self.address:#x} of {self.num_bytes} bytes does not lie in [0, 2^64)"
            )

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether the two share a byte."""
        return (
            self.device == other.device
            and self.address < other.address + other.num_bytes
            and other.address < self.address + self.num_bytes
        )


class Direction(Enum):
    """Which way the bytes of a batch go, seen from the side that posts it."""

    READ = "read"
    """remote -> local"""
    WRITE = "write"
    """local -> remote"""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Descriptors that are posted together, to one peer, between two devices.

    The three arrays have shape ``(n,)`` and become uint64, C-contiguous and read-only views. A batch that
    exists has positive lengths, no address past 2^64, and no byte of its destination written twice. That
    its local bytes are registered is checked by ``post``, that its remote bytes are by the carrier.

    >>> Batch("p", [4096], [8192], [16]).total_bytes
    16
    >>> Batch("p", [0, 8], [100, 200], [16, 16])
    Traceback (most recent call last):
    kvplan.errors.DescriptorError: descriptor 1 writes local address 0x8, which descriptor 0 writes too
    """

    peer: str
    """The name that ``connect`` was given."""
    local_address: NDArray[np.uint64]
    """Addresses on our side, bytes."""
    remote_address: NDArray[np.uint64]
    """Addresses on the peer's side, bytes; virtual addresses of the peer's process."""
    num_bytes: NDArray[np.uint64]
    """Length of each descriptor."""
    local_device: Device = CPU
    """Device of every local address."""
    remote_device: Device = CPU
    """Device of every remote address."""
    direction: Direction = Direction.READ
    """READ: remote -> local."""

    def __post_init__(self) -> None:
        for name in ("local_address", "remote_address", "num_bytes"):
            object.__setattr__(self, name, _as_uint64(name, getattr(self, name)))
        lengths = {len(self.local_address), len(self.remote_address), len(self.num_bytes)}
        if len(lengths) != 1:
            raise DescriptorError(
                f"arrays of one batch differ in length: {len(self.local_address)} local addresses, "
                f"{len(self.remote_address)} remote addresses, {len(self.num_bytes)} lengths"
            )
        zero = np.flatnonzero(self.num_bytes == 0)
        if zero.size:
            raise DescriptorError(f"descriptor {zero[0]} has 0 bytes; descriptors must move at least one")
        local_last = _last_byte("local", self.local_address, self.num_bytes)
        remote_last = _last_byte("remote", self.remote_address, self.num_bytes)
        if self.direction is Direction.READ:
            _refuse_overlap("local", self.local_address, local_last)
        else:
            _refuse_overlap("remote", self.remote_address, remote_last)

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that the whole batch moves."""
        return int(self.num_bytes.sum())


def _as_uint64(name: str, values: ArrayLike) -> NDArray[np.uint64]:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.uint64)
    if array.ndim != 1:
        raise DescriptorError(f"{name} has {array.ndim} dimensions; one is needed")
    if array.dtype.kind not in "iu":
        raise DescriptorError(f"{name} has dtype {array.dtype}; integers in [0, 2^64) are needed")
    if array.dtype.kind == "i" and (negative := np.flatnonzero(array < 0)).size:
        raise DescriptorError(f"{name}[{negative[0]}] is {array[negative[0]]}; it must not be negative")
    view = np.ascontiguousarray(array, dtype=np.uint64).view()
    view.flags.writeable = False
    return view


def _last_byte(side: str, address: NDArray[np.uint64], num_bytes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    last: NDArray[np.uint64] = address + (num_bytes - np.uint64(1))
    past = np.flatnonzero(last < address)
    if past.size:
        i = past[0]
        raise DescriptorError(f"descriptor {i}: {side} address {address[i]:#x} + {num_bytes[i]} bytes passes 2^64")
    return last


def _refuse_overlap(side: str, address: NDArray[np.uint64], last: NDArray[np.uint64]) -> None:
    if np.all(address[1:] > last[:-1]):
        return
    order = np.argsort(address, kind="stable")
    clash = np.flatnonzero(address[order[1:]] <= last[order[:-1]])
    if clash.size:
        first, second = sorted((int(order[clash[0]]), int(order[clash[0] + 1])))
        at = address[order[clash[0] + 1]]
        raise DescriptorError(f"descriptor {second} writes {side} address {at:#x}, which descriptor {first} writes too")


class State(Enum):
    """How far a posted batch is."""

    PENDING = "pending"
    """The carrier may still write."""
    DONE = "done"
    """Every byte has arrived; terminal."""
    FAILED = "failed"
    """Some bytes have not arrived and none will be written any more; terminal."""


class Progress(NamedTuple):
    """What ``poll`` says."""

    state: State
    reason: str = ""
    """Why a batch failed, in words for a person; empty otherwise."""


class Handle:
    """One posted batch, compared by identity. Only the transport that made it changes it."""

    __slots__ = ("num_bytes", "peer", "progress")

    def __init__(self, peer: str, num_bytes: int) -> None:
        self.peer = peer
        self.num_bytes = num_bytes
        self.progress = Progress(State.PENDING)

    @property
    def is_terminal(self) -> bool:
        """Whether no byte of the batch is written any more."""
        return self.progress.state is not State.PENDING

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.peer!r} {self.num_bytes} bytes {self.progress.state.value}>"


class Transport(ABC):
    """Moves batches between registered memory of this process and of its peers.

    ``post`` and ``poll`` are called by one thread at a time (the session's); the other verbs by the owner.
    Callers above the session do not use a transport directly. Most carriers extend
    `kvplan.transport.checked.CheckedTransport`, which does the checks that are the same everywhere.

    Examples
    --------
    >>> import numpy as np
    >>> from kvplan.transport import Batch, MemoryRange, create
    >>> source, destination = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    >>> with create("memory") as prefill, create("memory") as decode:
    ...     prefill.register([MemoryRange(source.ctypes.data, source.nbytes)])
    ...     decode.register([MemoryRange(destination.ctypes.data, destination.nbytes)])
    ...     decode.connect("prefill", prefill.metadata())
    ...     handle = decode.post(Batch("prefill", [destination.ctypes.data], [source.ctypes.data], [64]))
    ...     decode.poll(handle).state
    <State.DONE: 'done'>
    >>> bool((source == destination).all())
    True
    """

    name: ClassVar[str]
    """What `kvplan.transport.create` calls it."""

    @abstractmethod
    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Allow batches, ours and of peers, to touch ``ranges``. The memory must outlive the transport.

        Call it before ``metadata``: peers learn of the ranges through it.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """Return what a peer's ``connect`` needs. Opaque; never unpickled by anybody."""

    @abstractmethod
    def connect(self, peer: str, metadata: bytes) -> None:
        """Make ``peer`` known. The same metadata again does nothing; other metadata is a TransportError."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget ``peer``; does nothing when it is not known. Handles in flight stay valid until terminal."""

    @abstractmethod
    def post(self, batch: Batch) -> Handle:
        """Start moving ``batch``; an empty one is DONE at once. May copy before it returns.

        Raises TransportError (NotRegisteredError, PeerGoneError) when it is over at once, in failure: part of
        it may have been written, nothing of it is in flight.
        """

    @abstractmethod
    def poll(self, handle: Handle) -> Progress:
        """Return how far ``handle`` is. Raises nothing that a peer can cause; repeats a terminal answer."""

    @abstractmethod
    def close(self) -> None:
        """Give up everything within a bound; idempotent. Handles still in flight stay PENDING for ever."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
