"""The pool of engines, and order of magnitude of patience. Starting engines takes most of the time here."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.engines.pool import EnginePool


@pytest.fixture(scope="session")
def pool():
    """Engines for all tests of this folder. Their sockets need a short path, so not pytest's own folder.

    SIGTERM ends the run as Ctrl-C does: the engines are stopped.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="kvp-"))
    pool = EnginePool(folder)
    try:
        yield pool
    finally:
        pool.close()
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
