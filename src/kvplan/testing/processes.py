"""Starts a second rank process that registers patterned memory, and talks to it; no test and no session does.

The child is this module run as a program: it makes a transport by name, fills its regions by `pattern`, and
answers JSON lines on a private pipe. Its standard output goes to standard error, because carriers print.
Every wait is bounded; a child that does not answer is a `ProcessError`, never a hang.

    parent                                   child
    PeerProcess("nixl", sizes=(4096,)) --->  create, fill, register
                                       <---  {"metadata": hex, "regions": [[address, num_bytes]]}
    {"do": "read", ...}                --->
                                       <---  {"data": hex}
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvplan.transport import MemoryRange, create

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 20.0
_EXIT_TIMEOUT_S = 5.0
_PROGRAM = "import sys; from kvplan.testing.processes import serve; sys.exit(serve())"


class ProcessError(RuntimeError):
    """The second process ended or does not answer."""


class Peer(Protocol):
    """The other side of a conformance test, wherever it runs."""

    @property
    def metadata(self) -> bytes:
        """What its transport tells peers."""

    @property
    def regions(self) -> tuple[MemoryRange, ...]:
        """What it registered; region i is filled by ``pattern(seed + i, num_bytes)``."""

    @property
    def seed(self) -> int:
        """Seed of the first region's pattern."""

    def read(self, region: int) -> NDArray[np.uint8]:
        """Return the bytes that lie in ``region`` now, as the peer sees them."""

    def close_transport(self) -> None:
        """Close its transport; the process and its memory stay."""

    def kill(self) -> None:
        """End it at once, without any farewell."""

    def close(self) -> None:
        """End it and free everything; idempotent."""


def pattern(seed: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes that fill a region: the same for the same seed, different for another one.

    >>> bool((pattern(1, 64) == pattern(2, 64)).all())
    False
    """
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def memory_range(array: NDArray[np.uint8]) -> MemoryRange:
    """Return the range that ``array``, C-contiguous, occupies."""
    return MemoryRange(array.ctypes.data, array.nbytes)


class PeerProcess:
    """A second process with a transport and regions of ``sizes`` bytes. Use it as a context manager."""

    def __init__(
        self,
        transport: str,
        *,
        sizes: Sequence[int] = (1 << 16,),
        seed: int = 1,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.seed = seed
        ours, theirs = os.pipe()
        try:
            # Not the interpreter's -m: the package may have imported this module by then, which -m warns about.
            self._child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-c", _PROGRAM, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                pass_fds=(theirs,),
                env={**os.environ, **(environment or {})},
            )
        finally:
            os.close(theirs)
        self._answers = ours
        self._buffer = b""
        self._closed = False
        try:
            self._send({"transport": transport, "options": dict(options or {}), "sizes": list(sizes), "seed": seed})
            hello = self._receive(_START_TIMEOUT_S)
        except ProcessError:
            self.close()
            raise
        self.metadata = bytes.fromhex(hello["metadata"])
        self.regions = tuple(MemoryRange(address, num_bytes) for address, num_bytes in hello["regions"])

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def read(self, region: int) -> NDArray[np.uint8]:
        """See `Peer.read`."""
        return np.frombuffer(bytes.fromhex(self._ask("read", region=region)["data"]), dtype=np.uint8)

    def cpu_s(self) -> float:
        """Return the processor time that it has used so far, all threads."""
        return float(self._ask("cpu")["cpu_s"])

    def close_transport(self) -> None:
        """See `Peer.close_transport`."""
        self._ask("close_transport")

    def unmap(self, region: int) -> None:
        """Make it unmap the second half of ``region`` (page-aligned) while it stays registered: a broken peer."""
        self._ask("unmap", region=region)

    def freeze(self) -> None:
        """Stop it, as a debugger or an overloaded host would."""
        self._child.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """See `Peer.kill`. The child is reaped: nothing of it is left."""
        self._child.kill()
        self._child.wait(_EXIT_TIMEOUT_S)

    def close(self) -> None:
        """See `Peer.close`."""
        if self._closed:
            return
        self._closed = True
        stdin = self._child.stdin
        if stdin is not None:
            with suppress(BrokenPipeError):
                stdin.close()
        with suppress(ProcessLookupError):
            self.thaw()
        try:
            self._child.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        os.close(self._answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self._send({"do": do, **arguments})
        return self._receive(_ANSWER_TIMEOUT_S)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._child.stdin is None:
            raise ProcessError("the peer process has no standard input")
        try:
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise ProcessError(f"peer process {self.pid} has ended") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise ProcessError(f"peer process {self.pid} did not answer within {timeout_s} s")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise ProcessError(f"peer process {self.pid} ended; its error is on standard error")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer


class LocalPeer:
    """The same face for a transport in this process. ``kill`` can only close its transport."""

    def __init__(self, transport: str, *, sizes: Sequence[int] = (1 << 16,), seed: int = 1, **options: Any) -> None:
        self.seed = seed
        self._memory = [pattern(seed + i, n) for i, n in enumerate(sizes)]
        self.transport = create(transport, **options)
        self.regions = tuple(memory_range(m) for m in self._memory)
        self.transport.register(self.regions)
        self.metadata = self.transport.metadata()

    def read(self, region: int) -> NDArray[np.uint8]:
        """See `Peer.read`."""
        return self._memory[region].copy()

    def close_transport(self) -> None:
        """See `Peer.close_transport`."""
        self.transport.close()

    def kill(self) -> None:
        """See `Peer.kill`."""
        self.transport.close()

    def close(self) -> None:
        """See `Peer.close`."""
        self.transport.close()


def serve() -> int:
    """Run as the second process: one request line on standard input, one answer line on the pipe, until it ends."""
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        order = json.loads(sys.stdin.readline())
        memory = [_page_aligned(pattern(order["seed"] + i, n)) for i, n in enumerate(order["sizes"])]
        with create(order["transport"], **order["options"]) as transport:
            ranges = [memory_range(m) for m in memory]
            transport.register(ranges)
            _answer(
                answers,
                metadata=transport.metadata().hex(),
                regions=[(r.address, r.num_bytes) for r in ranges],
            )
            for line in sys.stdin:
                request = json.loads(line)
                match request["do"]:
                    case "read":
                        _answer(answers, data=memory[request["region"]].tobytes().hex())
                    case "cpu":
                        _answer(answers, cpu_s=time.process_time())
                    case "close_transport":
                        transport.close()
                        _answer(answers)
                    case "unmap":
                        _unmap_second_half(ranges[request["region"]])
                        _answer(answers)
                    case other:
                        _answer(answers, error=f"unknown request {other!r}")
    return 0


def _answer(answers: Any, **values: Any) -> None:
    answers.write(json.dumps(values).encode() + b"\n")
    answers.flush()


def _page_aligned(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    import mmap

    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # as an engine allocates its cache
    area = np.frombuffer(mmap.mmap(-1, data.nbytes, flags=private), dtype=np.uint8)
    area[:] = data
    return area


def _unmap_second_half(item: MemoryRange) -> None:
    import ctypes
    import mmap

    half = item.num_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).munmap(ctypes.c_void_p(item.address + half), ctypes.c_size_t(item.num_bytes - half))


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
