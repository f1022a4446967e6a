"""What differs between vLLM versions: the only file that knows. No other file of this room asks for a version.

What this room uses from vLLM, by version:

0.32
    - ``KVConnectorBase_V1(vllm_config, role, kv_cache_config)``; ``SupportsHMA.request_finished_all_groups``;
      failures per request as ``KVConnectorTransferResults.failed_recving``;
      handshake metadata keyed by (pp, tp) (``set_xfer_handshake_metadata_pp_aware``).
    - Every attention layer's cache is a view ``[blocks, heads, tokens, content]`` with the strides of the layout in
      use; state layers are int8 pages ``[blocks, 1, 1, bytes]`` (``v1/kv_cache_interface.py``).
    - ``KVCacheConfig.transfer_group_ids`` names the groups that a connector moves.

Earlier versions hand over caches of other shapes (K and V as a leading axis of 2, state as lists of tensors) and have
no request-level failures; they are refused.
"""

from __future__ import annotations

import logging
from typing import Any

from kvplan.errors import UnsupportedError

SUPPORTED = ((0, 32),)
"""(major, minor) of the vLLM versions that this room was written against and tested with."""


def check_version(version: str) -> None:
    """Refuse a vLLM version that this room was not written against.

    >>> check_version("0.32.1+cpu")
    >>> check_version("0.11.0")
    Traceback (most recent call last):
    kvplan.errors.UnsupportedError: vLLM 0.11.0 is not supported by this kvplan; these work: 0.32.x
    """
    numbers = version.partition("+")[0].split(".")
    try:
        found = (int(numbers[0]), int(numbers[1]))
    except (IndexError, ValueError):
        found = (-1, -1)
    if found not in SUPPORTED:
        works = ", ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
        raise UnsupportedError(f"vLLM {version} is not supported by this kvplan; these work: {works}")


def check_installed() -> None:
    """Refuse the installed vLLM when its version is not supported."""
    import vllm

    check_version(str(vllm.__version__))


def check_parallel(parallel_config: Any) -> None:
    """Refuse ways of spreading a model whose cache this room does not describe."""
    size = getattr(parallel_config, "prefill_context_parallel_size", 1)
    if size > 1:
        raise UnsupportedError(f"prefill_context_parallel_size is {size}; 1 works, with any TP, PP and DCP")


def share_logging() -> None:
    """Let our log lines go where vLLM's go: it configures its own logger only."""
    ours, theirs = logging.getLogger("kvplan"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def is_registered(factory: Any, name: str) -> bool:
    """Return whether the factory knows the name; asking for an unknown one raises ``ValueError``."""
    return name in getattr(factory, "_registry", {})
