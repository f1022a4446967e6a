"""Whether two engines may exchange cache: compares named fields. No layouts (the planner proves those), no wire.

Every field that either side names must be equal, as text; a field that one side lacks differs. Names that
start with ``info.`` are for people and never compared. What may differ between two deployments (parallel sizes,
block sizes and counts, strides, library versions) is simply not a field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.errors import CompatibilityError, Mismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

INFORMATION = "info."
"""Prefix of names that are shown, not compared."""
ABSENT = "(not stated)"
"""What stands for the value of a field that one side does not name."""

ADVICE = {
    "model": "serve the same model and revision on both sides",
    "dtype": "start both engines with the same --dtype",
    "cache_dtype": "start both engines with the same --kv-cache-dtype",
    "cache_formats": "start both engines with the same --kv-cache-dtype",
    "layers": "serve the same model on both sides",
    "num_kv_heads": "serve the same model on both sides",
    "head_size": "serve the same model on both sides",
    "speculative": "use the same speculative method and draft model, or none, on both sides",
    "mode": "use the same transfer mode (pull or push) on both sides",
    "transport": "use the same transport on both sides",
}
"""What helps, by field; for other names the advice is general."""


def mismatches(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[Mismatch, ...]:
    """Return every field that differs, by name.

    >>> [str(item) for item in mismatches({"dtype": "bfloat16", "info.tp": "1"}, {"dtype": "float32", "info.tp": "2"})]
    ['dtype: ours bfloat16, theirs float32 (start both engines with the same --dtype)']
    """
    names = sorted(name for name in {*ours, *theirs} if not name.startswith(INFORMATION))
    return tuple(
        Mismatch(name, ours.get(name, ABSENT), theirs.get(name, ABSENT), _advice(name))
        for name in names
        if ours.get(name) != theirs.get(name)
    )


def require_compatible(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise ``CompatibilityError`` with every differing field and both values."""
    found = mismatches(ours, theirs)
    if found:
        raise CompatibilityError(found)


def _advice(name: str) -> str:
    return ADVICE.get(name, f"make {name!r} equal on both sides")
