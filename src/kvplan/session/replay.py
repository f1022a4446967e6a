"""From a histogram's buckets back to durations that fill the same buckets and have the same sum. Pure arithmetic.

Some exporters only take single observations. For bucket counts ``c[i]`` of the intervals ``(low[i], high[i]]`` and a
sum ``S`` there is one ``t`` in [0, 1] with ``sum c[i] * (low[i] + t * (high[i] - low[i])) = S``; the durations at that
``t`` are in their buckets, and add up to ``S``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.session.declared import SECONDS_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Mapping

TINY = 1e-6
"""Distance from a bucket's lower edge, which belongs to the bucket below."""


def representatives(parts: Mapping[str, float]) -> list[tuple[float, int]]:
    """Return (seconds, how often) for the parts of one histogram as a snapshot names them; cumulative buckets.

    A part that is missing has not grown.

    >>> representatives({"le.0.25": 1, "le.0.5": 1, "le.1.0": 1, "count": 1, "sum": 0.2})
    [(0.2, 1)]
    """
    counts = _counts(parts)
    total = max(0.0, parts.get("sum", 0.0))
    lows = (0.0, *SECONDS_BUCKETS)
    least = sum(count * low for count, low in zip(counts, lows, strict=True))
    last = lows[-1] + max(0.0, total - least) / counts[-1] if counts[-1] else lows[-1]
    widths = [high - low for low, high in zip(lows, (*SECONDS_BUCKETS, last), strict=True)]
    reach = sum(count * width for count, width in zip(counts, widths, strict=True))
    t = min(1.0, max(TINY, (total - least) / reach)) if reach > 0 else 1.0
    return [(low + t * width, count) for count, low, width in zip(counts, lows, widths, strict=True) if count]


def _counts(parts: Mapping[str, float]) -> list[int]:
    """Return the observations in each bucket; a bound without a part repeats what grew below it."""
    counts, before = [], 0
    for bound in (*map(str, SECONDS_BUCKETS), "inf"):
        here = round(parts.get(f"le.{bound}", before))
        counts.append(max(0, here - before))
        before = max(before, here)
    return counts
