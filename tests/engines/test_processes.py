"""Ending the processes of a session: children whose parent died, resource trackers, shared memory. No vLLM here."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from multiprocessing import shared_memory as shm
from pathlib import Path

import pytest

from kvplan.engines.processes import end_session, remove_shared_memory, session_members, shared_memory


def start(code):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline().strip() == "ready"
    return process


@pytest.fixture
def sessions():
    """Starts processes; nothing of them is left after the test."""
    started = []

    def launch(code):
        started.append(start(code))
        return started[-1]

    yield launch
    for process in started:
        end_session(process.pid, grace_s=0.0)
        process.wait(5)
        process.stdout.close()


ORPHANS = """
    import subprocess, sys, time
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    subprocess.run([sys.executable, "-c", child])
    print("ready", flush=True)
    time.sleep(60)
"""


def test_children_whose_parent_died_are_members_and_end(sessions):
    process = sessions(ORPHANS)
    members = session_members(process.pid)
    assert process.pid in members
    assert len(members) == 2
    assert sorted(end_session(process.pid, grace_s=0.0)) == sorted(members)
    assert session_members(process.pid) == []


def test_a_session_that_ends_by_itself_is_not_killed(sessions):
    process = sessions("print('ready', flush=True)")
    assert end_session(process.pid, grace_s=5.0) == []


def test_our_own_session_is_another():
    assert session_members(0x7FFFFFFF) == []


SHARES = """
    import time
    from multiprocessing import shared_memory
    segment = shared_memory.SharedMemory("kvplan-test-{name}", create=True, size=4096)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_the_resource_tracker_is_spared_until_it_has_cleaned_up(sessions):
    process = sessions(SHARES.format(name="tracked"))
    assert shared_memory(process.pid) == {Path("/dev/shm/kvplan-test-tracked")}
    end_session(process.pid, grace_s=0.0)
    assert not Path("/dev/shm/kvplan-test-tracked").exists()


def test_shared_memory_that_nobody_tracks_is_removed(sessions):
    segment = shm.SharedMemory("kvplan-test-left", create=True, size=4096)
    try:
        process = sessions("""
            import mmap, time
            with open("/dev/shm/kvplan-test-left", "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
            print("ready", flush=True)
            time.sleep(60)
        """)
        segments = shared_memory(process.pid)
        assert segments == {Path("/dev/shm/kvplan-test-left")}
        end_session(process.pid, grace_s=0.0)
        remove_shared_memory(segments)
        remove_shared_memory(segments)
        assert not Path("/dev/shm/kvplan-test-left").exists()
    finally:
        segment.close()
        Path("/dev/shm/kvplan-test-left").touch()
        segment.unlink()


def test_an_engines_first_process_ends_with_its_owner(tmp_path):
    """`sitecustomize` watches the owner; here a plain Python process stands for the engine."""
    soft = Path(__file__).parents[2] / "src" / "kvplan" / "engines" / "soft"
    owner = f"""
        import os, subprocess, sys, time
        env = os.environ | {{"PYTHONPATH": {str(soft)!r}, "KVPLAN_OWNER_PID": str(os.getpid())}}
        code = "import time; time.sleep(60)"
        engine = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True)
        print(engine.pid, flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(owner)], stdout=subprocess.PIPE, text=True)
    engine_pid = int(process.stdout.readline())
    assert session_members(engine_pid) == [engine_pid]
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while session_members(engine_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert session_members(engine_pid) == []
