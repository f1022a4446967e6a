"""Threads for what takes long, beside the session's two threads that must go on talking. Knows nothing of its jobs.

They are started by the first job: a session that has none does not pay for them. A job makes its own result known;
one that raises costs nobody but itself.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.session.stats import Stats

    Job = Callable[[], object]

logger = logging.getLogger(__name__)


class Hands(NamedTuple):
    """Who does what takes long, for whom, as the one who has it done sees it."""

    submit: Callable[[Job], bool]
    """Takes a job for later; returns whether there was room. The job runs in any thread."""
    wake: Callable[[], object] = lambda: None
    """Makes the one who waits for results look for them; a job calls it last."""
    is_open: Callable[[], bool] = lambda: True
    """Whether results are still wanted; long jobs look every few milliseconds."""


def at_once(job: Job) -> bool:
    """Do a job here and now.

    >>> at_once(lambda: None)
    True
    """
    job()
    return True


AT_ONCE = Hands(at_once)
"""For those who may take long themselves."""


class Worker:
    """A bounded queue and its threads."""

    def __init__(self, *, name: str, max_queue: int, stats: Stats, num_threads: int = 1) -> None:
        self._name = name
        self._stats = stats
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_queue)
        self._lock = threading.Lock()
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether results are still wanted."""
        return self._open

    def submit(self, job: Job) -> bool:
        """Take a job; return whether there was room. Callable from any thread."""
        with self._lock:
            if not self._open:
                return False
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                self._stats.add("overloads")
                return False
            while len(self._threads) < self._num_threads:
                self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
                self._threads[-1].start()
        return True

    def close(self) -> None:
        """Drop the jobs that wait and wait for those that run, which end early when they look. Idempotent."""
        with self._lock:
            self._open = False
        for thread in self._threads:
            if thread.is_alive():
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._open:
                continue
            try:
                job()
            except Exception:
                self._stats.add("loop_errors")
                logger.exception("%s: a job failed", self._name)
