"""Linux calls that the CMA transport needs, and facts about processes; no batches and no peers.

``process_vm_readv(2)`` and ``process_vm_writev(2)`` copy between two processes' memory in one system call. They
take 1,024 vectors (``UIO_MAXIOV``), move at most 0x7ffff000 bytes a call, may move less than asked, and are
synchronous: when they have returned, nothing writes any more. ctypes releases the GIL around them.
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.errors import PeerGoneError, TransportError, UnsupportedError
from kvplan.transport.base import Direction

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_VECTORS = 1024
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value
_CALLS = {Direction.READ: "process_vm_readv", Direction.WRITE: "process_vm_writev"}


@dataclass(frozen=True, slots=True)
class Process:
    """A process that a pid cannot be mistaken for: a reused pid has another start time."""

    boot: str
    """Boot id of the kernel: another value is another machine."""
    namespace: str
    """Pid namespace: in another one the pid means another process."""
    pid: int
    start_ticks: int
    """When it started, in clock ticks since boot."""

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pid = os.getpid()
        return cls(boot, str(Path("/proc/self/ns/pid").readlink()), pid, start_ticks(pid) or 0)


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started (field 22 of ``/proc/pid/stat``, proc(5)), or None when there is none such."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


def copy_vectors(
    direction: Direction, pid: int, local: NDArray[np.uint64], remote: NDArray[np.uint64], *, peer: str
) -> int:
    """Copy once; return how many bytes were moved, at least 1. ``local`` and ``remote`` are (n, 2): address, bytes.

    Raises TransportError, with nothing moved by this call, and says what can be done.
    """
    moved: int = _call(_CALLS[direction])(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if moved > 0:
        return moved
    raise _explain(ctypes.get_errno() if moved < 0 else errno.EFAULT, direction, pid, peer)


def let_any_tracer() -> None:
    """Let every process of this user read our memory, under yama's ptrace_scope 1. Ends with the process."""
    if _library().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # EINVAL: a kernel without yama, where there is nothing to allow
            raise TransportError(f"prctl(PR_SET_PTRACER): {os.strerror(code)}")


def ptrace_scope() -> int | None:
    """Return yama's ``ptrace_scope``, or None on a kernel without yama."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _explain(code: int, direction: Direction, pid: int, peer: str) -> TransportError:
    error = _describe(code, direction, pid, peer)
    error.errno = code
    return error


def _describe(code: int, direction: Direction, pid: int, peer: str) -> TransportError:
    if code == errno.ESRCH:
        return PeerGoneError(f"peer {peer!r}: process {pid} has ended", peer=peer)
    if code == errno.EFAULT:
        return TransportError(
            f"peer {peer!r}: memory of process {pid}, or ours, is not mapped or does not allow a {direction.value}",
            peer=peer,
        )
    if code == errno.EPERM:
        return TransportError(
            f"peer {peer!r}: not allowed to touch the memory of process {pid} (ptrace_scope is {ptrace_scope()}). "
            f"Both processes must run as one user; under ptrace_scope 1 create the peer's transport with "
            f"allow_any_tracer=True; under 2 CAP_SYS_PTRACE is needed; 3 forbids it. In containers add "
            f"CAP_SYS_PTRACE or share the pid namespace",
            peer=peer,
        )
    if code == errno.ENOSYS:
        return TransportError(f"peer {peer!r}: this kernel, or its sandbox, has no {_CALLS[direction]}", peer=peer)
    return TransportError(f"peer {peer!r}: {_CALLS[direction]} of process {pid}: {os.strerror(code)}", peer=peer)


@cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


@cache
def _call(name: str) -> Any:
    try:
        call = getattr(_library(), name)
    except AttributeError:
        raise UnsupportedError(f"transport 'cma' needs Linux's {name}, which this C library does not have") from None
    call.restype = ctypes.c_ssize_t
    size, address = ctypes.c_ulong, ctypes.c_void_p
    call.argtypes = (ctypes.c_int, address, size, address, size, size)
    return call
