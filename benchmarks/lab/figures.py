"""Figures: seconds of contenders that take turns, as medians, spreads and ratios within one run. Prints nothing.

Machines that others use too disturb single measurements. So contenders are measured in rounds, each once a round, in an
order that turns; a ratio is the median of the rounds' ratios; and a round in which other processes took much of the
machine is measured again, within a bound.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field

import psutil

BUSY_SHARE = 0.25
"""Share of one core that other processes may take during a round that counts."""
LEAST_S = 0.02
"""Shorter rounds are not judged: the kernel counts processor time in steps of 10 ms."""


@dataclass
class Figures:
    """Seconds by contender, one value per round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_disturbed: int = 0
    """Rounds that were measured again, or kept for lack of patience."""

    def median(self, name):
        return statistics.median(self.seconds[name])

    def spread(self, name):
        """Return (lowest, highest)."""
        return min(self.seconds[name]), max(self.seconds[name])

    def ratio(self, ours, other):
        """Return how many times as long ``other`` takes: the median of the rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.seconds[ours], self.seconds[other], strict=True))

    def __contains__(self, name):
        return name in self.seconds


def measure(contenders, *, rounds, patience=2.0, warm=1):
    """Return the figures of ``{name: function that returns seconds}``; None from a function drops the contender."""
    figures = Figures({name: [] for name in contenders})
    names = list(contenders)
    for _ in range(warm):
        for name in names:
            contenders[name]()
    tries = int(rounds * patience)
    done = 0
    while done < rounds:
        tries -= 1
        turn = names[done % len(names) :] + names[: done % len(names)]
        watch = Watch()
        taken = {name: contenders[name]() for name in turn}
        disturbed = watch.is_disturbed()
        figures.num_disturbed += disturbed
        if disturbed and tries > rounds - done - 1:
            continue
        for name, value in taken.items():
            figures.seconds[name].append(value)
        done += 1
    return figures


def timed(function):
    """Return a function that returns how long ``function`` takes."""

    def run():
        began_at = time.perf_counter()
        function()
        return time.perf_counter() - began_at

    return run


class Watch:
    """Looks at how much processor time others take from now on."""

    def __init__(self):
        self._began_at = time.perf_counter()
        self._busy, self._own = busy_s(), own_s()

    def others_share(self):
        """Return the share of one core that others took, or 0 when too little time has passed to say."""
        elapsed = time.perf_counter() - self._began_at
        if elapsed < LEAST_S:
            return 0.0
        return max(0.0, (busy_s() - self._busy) - (own_s() - self._own)) / elapsed

    def is_disturbed(self):
        return self.others_share() > BUSY_SHARE


def wait_quiet(patience_s, *, look_s=0.5):
    """Wait until others leave the machine alone, at most so long; return whether they do."""
    ends_at = time.perf_counter() + patience_s
    while True:
        watch = Watch()
        time.sleep(look_s)
        if not watch.is_disturbed():
            return True
        if time.perf_counter() > ends_at:
            return False


def busy_s():
    """Return the processor seconds that the whole machine has used."""
    t = psutil.cpu_times()
    return t.user + t.nice + t.system + t.irq + t.softirq + getattr(t, "steal", 0.0)


def own_s():
    """Return the processor seconds that this process and its children have used."""
    me = psutil.Process()
    total = sum(os.times()[:4])
    for child in me.children(recursive=True):
        try:
            t = child.cpu_times()
        except psutil.Error:
            continue
        total += t.user + t.system
    return total
