"""Sliding-window attention: the bytes of attention, of fewer tokens. No layout of its own.

A window layer stores K and V exactly as full attention does. What differs is which tokens exist: at token ``n`` a
query sees the last ``window`` tokens, so an engine keeps blocks that hold tokens ``[n - window + 1, n)`` and drops
those before. A dropped block is a hole in the block table (or lies before its first token), and a hole moves nothing.
Fact: vLLM 0.32 keeps the last ``window - 1`` computed tokens (``SlidingWindowSpec`` in ``v1/kv_cache_interface.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvplan.layouts.attention import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """One sliding-window layer's K and V."""

    kind: ClassVar[str] = "sliding_window"
    window: int
    """Tokens that a query sees, its own included."""


def first_kept_token(num_tokens: int, window: int, tokens_per_block: int) -> int:
    """Return the first token of the first block that an engine keeps once ``num_tokens`` are computed.

    >>> first_kept_token(63 * 64, 1024, 64) // 64, first_kept_token(100, 1024, 16)
    (47, 0)
    """
    first = max(0, num_tokens - window + 1)
    return first // tokens_per_block * tokens_per_block
