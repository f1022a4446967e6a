"""Imported by Python itself in every process of an engine that this room starts. Only for engines on small machines.

1. An engine ends when the process that started it ends, however that happened (`KVPLAN_OWNER_PID`). A thread of the
   engine's first process watches. It asks politely first; a vLLM server that is asked while it starts may stay for
   ever without its engine, so after a while its whole process group is killed.
2. vLLM's readers of shared-memory broadcasts spin on `os.sched_yield` for a second after each message; several engines
   on two cores then crawl. `KVPLAN_SOFT_YIELD_US` lets such a yield sleep. kvplan's own threads never spin and need no
   help.
"""

import os
import signal
import threading
import time

_WATCH_S = 1.0
_GRACE_S = 10.0


def _end_with_owner(owner_pid: int) -> None:
    while os.getppid() == owner_pid:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _soften_yield(sleep_s: float) -> None:
    def softer_yield() -> None:
        time.sleep(sleep_s)

    os.sched_yield = softer_yield


if os.environ.get("KVPLAN_OWNER_PID") and os.getsid(0) == os.getpid():
    _owner_pid = int(os.environ["KVPLAN_OWNER_PID"])
    threading.Thread(target=_end_with_owner, args=(_owner_pid,), name="kvplan-owner-watch", daemon=True).start()
if os.environ.get("KVPLAN_SOFT_YIELD_US"):
    _soften_yield(int(os.environ["KVPLAN_SOFT_YIELD_US"]) / 1e6)
