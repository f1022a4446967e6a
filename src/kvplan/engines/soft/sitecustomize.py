"""Imported by Python itself in every process of an engine that this room starts. Only for engines on small machines.

1. An engine ends when the process that started it ends, however that happened (`KVPLAN_OWNER_PID`).
2. vLLM's readers of shared-memory broadcasts spin on `os.sched_yield` for a second after each message; several engines
   on two cores then crawl. `KVPLAN_SOFT_YIELD_US` lets such a yield sleep. kvplan's own threads never spin and need no
   help.
"""

import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1


def _end_with_owner(owner_pid: int) -> None:
    if os.getppid() == owner_pid:  # only the engine's first process; it looks after its own children
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _soften_yield(sleep_s: float) -> None:
    def softer_yield() -> None:
        time.sleep(sleep_s)

    os.sched_yield = softer_yield


if os.environ.get("KVPLAN_OWNER_PID"):
    _end_with_owner(int(os.environ["KVPLAN_OWNER_PID"]))
if os.environ.get("KVPLAN_SOFT_YIELD_US"):
    _soften_yield(int(os.environ["KVPLAN_SOFT_YIELD_US"]) / 1e6)
