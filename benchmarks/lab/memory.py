"""Memory that a step takes: the process's own pages, and the allocations that Python sees."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import tracemalloc

import psutil

LOOK_S = 0.002


class PeakRss:
    """Watches the process's resident memory from another thread while the block runs; ``grown`` is the peak's growth."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._process = psutil.Process()
        self._before = self._peak = self._process.memory_info().rss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.is_set():
            self._peak = max(self._peak, self._process.memory_info().rss)
            time.sleep(LOOK_S)

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self.grown = max(self._peak, self._process.memory_info().rss) - self._before


def traced_peak(function):
    """Return (what ``function`` returns, peak bytes allocated through Python meanwhile, bytes still held). It is slowed down."""
    gc.collect()
    tracemalloc.start()
    try:
        result = function()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return result, peak, held
