"""One running vLLM engine: start, wait until it serves, stop. What it shall be stands in `options`.

The life of an engine:
1. `start` launches the server as the leader of a new session, its output in a log file.
2. `poll` says how far it is; `wait_all` polls several until each serves, within a bound.
3. `stop` asks it to end, then ends by process id what is left of its session. It may be called at any time, twice too.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvplan.engines.client import http_client
from kvplan.engines.options import EngineOptions, Ports, command_line, environment
from kvplan.engines.processes import end_session, remove_shared_memory, session_members, shared_memory
from kvplan.errors import EngineError

__all__ = ["STAGES", "Engine", "Progress", "stage_of", "tail", "wait_all"]

STAGES = (
    ("Available routes", "opening its doors"),
    ("Application startup", "opening its doors"),
    ("init engine", "ready to serve"),
    ("KV cache size", "warming up"),
    ("Loading weights took", "allocating its cache"),
    ("Starting to load model", "loading the model"),
    ("Initializing a V1 LLM engine", "starting its workers"),
    ("non-default args", "reading its configuration"),
)
"""What a line of vLLM's log means to somebody who waits; the furthest stage first."""

_ERROR = re.compile(r"\b[\w.]+(?:Error|Exception): .+")
_POLL_S = 0.25
_GRACE_S = 15.0
_CHILDREN_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an engine's start is."""

    engine: str
    stage: str
    elapsed_s: float
    serving: bool


class Engine:
    """A vLLM server on loopback, owned by this process: it ends at the latest when this process does."""

    def __init__(self, options: EngineOptions, ports: Ports, *, folder: Path) -> None:
        self.options = options
        self.ports = ports
        self.url = f"http://{ports.host}:{ports.api}"
        self.log = folder / f"{options.name}.log"
        self.start_s = 0.0
        """Seconds from launch until it served; 0 before."""
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._launched = 0.0

    @property
    def pid(self) -> int | None:
        """The process id of the server, which is also its session id; None when it was never started."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Launches the server and returns at once."""
        command = command_line(self.options, self.ports)
        env = environment(self.options, self.ports, scratch=self._folder)
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self._launched = time.monotonic()
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def poll(self) -> Progress:
        """How far it is; raises EngineError when the server has ended."""
        if not self.alive:
            code = None if self._process is None else self._process.returncode
            raise self.failed(f"ended with exit status {code}")
        serving = self._answers_health()
        elapsed_s = time.monotonic() - self._launched
        if serving and not self.start_s:
            self.start_s = elapsed_s
        return Progress(self.options.name, "serving" if serving else stage_of(self.log), elapsed_s, serving)

    def log_text(self) -> str:
        """Everything that its processes have written so far."""
        return self.log.read_text(errors="replace")

    def failed(self, what: str) -> EngineError:
        """An error that says what this engine did, with the end of its log."""
        name = self.options.name
        causes = "".join(f"\n  {line}" for line in errors_in(self.log))
        end = f"The end of its log ({self.log}):\n{tail(self.log)}"
        return EngineError(f"engine {name!r} {what}.{causes}\n{end}", engine=name)

    def stop(self, *, grace_s: float = _GRACE_S) -> list[int]:
        """Ends the server and every process of its session; returns the ids of those that had to be killed."""
        return self._end(signal.SIGTERM, grace_s)

    def kill(self) -> list[int]:
        """Ends every process of its session at once, as a crash of the machine would."""
        return self._end(signal.SIGKILL, 0.0)

    def _end(self, first_signal: signal.Signals, grace_s: float) -> list[int]:
        if self._process is None:
            return []
        segments = shared_memory(self._process.pid)
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, first_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        killed = end_session(self._process.pid, grace_s=min(grace_s, _CHILDREN_GRACE_S))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CHILDREN_GRACE_S)
        remove_shared_memory(segments)
        return killed

    def members(self) -> list[int]:
        """The ids of all its living processes."""
        return [] if self._process is None else session_members(self._process.pid)

    def _answers_health(self) -> bool:
        try:
            return http_client().get(f"{self.url}/health", timeout=2.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


def wait_all(
    engines: Sequence[Engine], *, timeout_s: float, on_progress: Callable[[Progress], None] | None = None
) -> None:
    """Returns when every engine serves. Raises EngineError when one ends or `timeout_s` is over."""
    deadline = time.monotonic() + timeout_s
    waiting = list(engines)
    while waiting:
        for engine in list(waiting):
            progress = engine.poll()
            if on_progress is not None:
                on_progress(progress)
            if progress.serving:
                waiting.remove(engine)
        if waiting and time.monotonic() > deadline:
            raise waiting[0].failed(f"did not serve within {timeout_s:.0f} s")
        if waiting:
            time.sleep(_POLL_S)


def stage_of(log: Path) -> str:
    """What the engine is doing, read off its log."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return "starting"
    return next((stage for sign, stage in STAGES if sign in text), "importing its libraries")


def errors_in(log: Path, *, num_lines: int = 5) -> list[str]:
    """The first different errors that a log names: the cause, where the end of the log tells only the consequence."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = (_ERROR.search(line) for line in lines)
    return list(dict.fromkeys(match[0] for match in found if match))[:num_lines]


def tail(log: Path, *, num_lines: int = 40) -> str:
    """The last lines of a log file, or why there are none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(f"  | {line}" for line in lines[-num_lines:])
