"""Finding and ending the processes of one POSIX session, by process id, and their shared memory. Knows no engines.

An engine is a tree of processes. Children whose parent died are re-parented, so walking the tree would lose them; their
session id stays. Every engine is started as the leader of its own session, and what carries that session id is its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["end_session", "remove_shared_memory", "session_members", "shared_memory"]

_POLL_S = 0.05
_KILL_WAIT_S = 3.0


def session_members(session_id: int) -> list[int]:
    """Process ids of the living members of a session; the dead that nobody has waited for are left out."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if _session_of(pid) == session_id]


def end_session(session_id: int, *, grace_s: float) -> list[int]:
    """Waits up to `grace_s` for a session to end by itself, then kills what is left; returns the ids it killed.

    Python's resource trackers are spared until last: they remove the shared memory of those that were killed. Pass what
    `shared_memory` said before to `remove_shared_memory` afterwards: vLLM leaves segments of its CPU workers behind.
    """
    _wait_until_empty(session_id, grace_s)
    killed = _kill(pid for pid in session_members(session_id) if not _is_resource_tracker(pid))
    if killed:
        _wait_until_empty(session_id, _KILL_WAIT_S)
    killed += _kill(session_members(session_id))
    _wait_until_empty(session_id, _KILL_WAIT_S)
    return killed


def shared_memory(session_id: int) -> set[Path]:
    """The files under /dev/shm that members of a session have mapped now."""
    return {path for pid in session_members(session_id) for path in _mapped_shared_memory(pid)}


def remove_shared_memory(paths: Iterable[Path]) -> None:
    """Removes segments whose owners have ended. Those that are gone already are fine."""
    for path in paths:
        path.unlink(missing_ok=True)


def _mapped_shared_memory(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = (line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line)
    return {Path(name) for name in names if not name.endswith("(deleted)")}


def _session_of(pid: int) -> int | None:
    # /proc/PID/stat: pid (name) state ppid pgrp session ...; the name may hold spaces and brackets.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[3])


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill(pids: Iterable[int]) -> list[int]:
    killed = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def _wait_until_empty(session_id: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while session_members(session_id) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
