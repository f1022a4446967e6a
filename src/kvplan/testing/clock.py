"""A clock that tests move by hand. Nothing here knows what the time is for."""

from __future__ import annotations


class FakeClock:
    """Stands for ``time.monotonic``; time passes when the test says so, and never backwards.

    >>> clock = FakeClock(100.0)
    >>> clock.advance(2.5)
    102.5
    >>> clock()
    102.5
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Let time pass and return the new time."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back {-seconds} s")
        self._now += seconds
        return self._now

    def advance_to(self, now: float) -> float:
        """Let time pass until ``now`` and return it."""
        return self.advance(now - self._now)
