"""Summaries: what a plan costs, before a byte moves. Nothing is decided here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.planner.plan import PlanPart


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Bytes and runs of a plan; run sizes are those of the rows, before neighbouring blocks merge."""

    bytes_per_token: float
    """Bytes that move for each token of the sequence."""
    runs_per_token: float
    """Runs for each token of the sequence."""
    state_bytes: int
    """Bytes that move once per request: state, which no token axis cuts."""
    state_runs: int
    smallest_run: int
    """Bytes of the smallest run; 0 for an empty plan."""
    median_run: int
    """Bytes of the median run, each run counted as often as it occurs in one period; 0 for an empty plan."""

    def bytes_for(self, num_tokens: int) -> float:
        """Return the bytes that a request of ``num_tokens`` tokens moves, full blocks assumed."""
        return self.bytes_per_token * num_tokens + self.state_bytes

    def runs_for(self, num_tokens: int) -> float:
        """Return the descriptors that a request of ``num_tokens`` tokens needs if no neighbouring blocks merge."""
        return self.runs_per_token * num_tokens + self.state_runs


def summarise(parts: Sequence[PlanPart]) -> PlanSummary:
    """Return the summary of plan parts, of one pair of ranks or of many."""
    token_bytes = token_runs = 0.0
    state_bytes = state_runs = 0
    sizes = []
    for part in parts:
        num_bytes = int(part.rows.num_bytes.sum()) * part.num_regions
        num_runs = len(part.rows.num_bytes) * part.num_regions
        if part.period_tokens is None:
            state_bytes, state_runs = state_bytes + num_bytes, state_runs + num_runs
        else:
            token_bytes += num_bytes / part.period_tokens
            token_runs += num_runs / part.period_tokens
        sizes.append(np.repeat(part.rows.num_bytes, part.num_regions))
    every = np.concatenate(sizes) if sizes else np.empty(0, np.int64)
    smallest, median = (int(every.min()), int(np.median(every))) if len(every) else (0, 0)
    return PlanSummary(token_bytes, token_runs, state_bytes, state_runs, smallest, median)
