"""Running an ASGI application on a TCP port: in this thread until it is told to end, or in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from kvplan.errors import EngineError

__all__ = ["serve", "serve_in_thread"]

_START_TIMEOUT_S = 10.0


def serve(app: ASGIApp, *, host: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM."""
    uvicorn.run(app, host=host, port=port, log_level="info", access_log=False)


@contextmanager
def serve_in_thread(app: ASGIApp, *, host: str, port: int) -> Iterator[str]:
    """Serves while the block runs; gives the base URL. Port 0 takes a free one."""
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="kvplan-router", daemon=True)
    thread.start()
    try:
        _wait_until_started(server, thread)
        actual = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://{host}:{actual}"
    finally:
        server.should_exit = True
        thread.join(_START_TIMEOUT_S)


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise EngineError("the router did not start: is its port taken?")
        time.sleep(0.01)
