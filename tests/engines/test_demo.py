"""`kvplan demo` as a user starts it: in a process of its own, to its end, and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.nixl, pytest.mark.timeout(500)]

BOUND_S = 400.0


def demo(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "kvplan", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def started_by(pid):
    """Processes that carry a demo's id in their environment: its engines, and whatever they started."""
    mark = f"KVPLAN_OWNER_PID={pid}\0".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue  # it ended, or is not ours
    return found


def test_the_demo_succeeds_and_leaves_nothing_behind(pool):
    pool.rest()
    before = set(Path("/dev/shm").iterdir())
    process = demo("--prompts", "3", "--prefill-tp", "1", "--decode-tp", "2")
    output, _ = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, output
    assert "3 of 3 answers are those of a single engine, from cache that was moved." in output
    assert output.count(" equal ") == 3
    assert started_by(process.pid) == []
    assert {path for path in set(Path("/dev/shm").iterdir()) - before if "vllm" in path.name} == set()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminated"]
)
def test_an_interrupted_demo_stops_its_engines(number, status):
    process = demo("--prompts", "1")
    deadline = time.monotonic() + 120
    while len(started_by(process.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(started_by(process.pid)) >= 3
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert started_by(process.pid) == []
