"""Several engines that live and end together, in one folder. What one engine is stands in `engine`."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from kvplan.engines.engine import Engine, Progress, wait_all
from kvplan.engines.options import EngineOptions, Ports
from kvplan.engines.ports import PortPool

__all__ = ["Fleet", "terminate_as_exit"]

_START_TIMEOUT_S = 300.0


class Fleet:
    """Starts engines, knows them all, and leaves no process behind when its `with` block ends, however it ends.

    `folder` gets the logs and the engines' sockets; None makes a temporary one, which is removed at the end unless
    `keep` is true.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        keep: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._given_folder = folder
        self._keep = keep or folder is not None
        self._on_progress = on_progress
        self._ports = PortPool()
        self._engines: list[Engine] = []
        self.folder = Path(tempfile.mkdtemp(prefix="kvp-")) if folder is None else folder

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines that have been started and not stopped."""
        return tuple(self._engines)

    def start(self, *options: EngineOptions, timeout_s: float = _START_TIMEOUT_S) -> list[Engine]:
        """Starts engines beside each other and returns when all serve; if one fails, all of these are stopped."""
        started: list[Engine] = []
        try:
            for one in options:
                ports = Ports(api=self._ports.take(), side_channel=self._ports.take())
                engine = Engine(one, ports, folder=self.folder)
                started.append(engine)
                self._engines.append(engine)
                engine.start()
            wait_all(started, timeout_s=timeout_s, on_progress=self._on_progress)
        except BaseException:
            self.stop(started)
            raise
        return started

    def stop(self, engines: Sequence[Engine]) -> None:
        """Stops these engines; each is tried, whatever happens with the others."""
        with ExitStack() as stack:
            for engine in engines:
                stack.callback(self._forget, engine)
                stack.callback(engine.stop)

    def close(self) -> None:
        """Stops every engine and removes the temporary folder."""
        try:
            self.stop(self.engines)
        finally:
            if not self._keep:
                shutil.rmtree(self.folder, ignore_errors=True)

    def take_port(self) -> int:
        """A free port on loopback for something else of the same run."""
        return self._ports.take()

    def _forget(self, engine: Engine) -> None:
        if engine in self._engines:
            self._engines.remove(engine)


@contextmanager
def terminate_as_exit() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise SystemExit, so that `with` blocks clean up. Main thread only."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
