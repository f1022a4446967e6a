"""Where vLLM's CPU attention puts each element of a block of one head: measured with its kernel. No layers, no heads.

The kernel that writes the cache packs K and V by instruction set (``v1/attention/backends/cpu_attn.py``, vLLM 0.32:
``vec``, ``vec16``, ``amx``, ``neon``, ...): with ``vec`` K lies as ``[head_dim, block_size]``, with ``amx`` in pairs of
dimensions for tiles of 16 tokens. Instead of believing a table, one scratch block is written and read:

1. The kernel writes digits, base 8: every element of K (then of V) is 1 to 8, V (then K) is 0. A constant digit gives
   the stored code of that digit; ``ceil(log8 n)`` passes give each byte position its token, as many its dimension.
2. Position is a function of (token, dim). It must be one to one, and the sum of a function of each: then it is two
   axes. Anything else is refused.
3. Each axis is compressed into affine spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvplan.errors import UnsupportedError
from kvplan.planner import Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Write = Callable[[str, NDArray[np.int64]], NDArray[np.int64]]

BASE = 8
"""Digits are 1 to 8: every cache format, fp8 e5m2 too, stores them exactly."""


class Packing(NamedTuple):
    """Element offsets in a block of one head: ``base + token[t] + dim[d]`` for K and for V."""

    key: Operand
    value: Operand


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand's offsets, counted in elements."""

    base: int
    token: tuple[int, ...]
    dim: tuple[int, ...]


def measure(write: Write, *, num_tokens: int, head_dim: int) -> Packing:
    """Return the packing of ``write``.

    ``write(operand, digits)`` stores ``digits`` (int64, shape [num_tokens, head_dim], values 1 to 8) as ``key`` or
    ``value``, zeros as the other operand, and returns the raw codes of the block of one head (shape [elements]).
    """
    return Packing(*(_measure(write, operand, num_tokens, head_dim) for operand in ("key", "value")))


def _measure(write: Write, operand: str, num_tokens: int, head_dim: int) -> Operand:
    shape = (num_tokens, head_dim)
    codes = _codes(write, operand, shape)
    token = _indices(write, operand, codes, np.broadcast_to(np.arange(num_tokens)[:, None], shape))
    dim = _indices(write, operand, codes, np.broadcast_to(np.arange(head_dim)[None, :], shape))
    held = np.flatnonzero(token >= 0)
    position = np.full(shape, -1, dtype=np.int64)
    position[token[held], dim[held]] = held
    if len(held) != position.size or (position < 0).any():
        raise UnsupportedError(f"the CPU attention stores {len(held)} elements of {operand} for {position.size}")
    return separate(position, operand)


def separate(position: NDArray[np.int64], operand: str) -> Operand:
    """Return the offsets of a [tokens, dims] table of positions as a sum of two axes.

    >>> separate(np.array([[0, 4], [1, 5]]), "key")
    Operand(base=0, token=(0, 1), dim=(0, 4))
    """
    base = int(position[0, 0])
    token, dim = position[:, 0] - base, position[0, :] - base
    if not np.array_equal(position, base + token[:, None] + dim[None, :]):
        raise UnsupportedError(f"the CPU attention's order of {operand} in a block is not separable into token and dim")
    return Operand(base, tuple(token.tolist()), tuple(dim.tolist()))


def _codes(write: Write, operand: str, shape: tuple[int, int]) -> NDArray[np.int64]:
    """Return the stored code of digit d at index d; index 0 is the code of nothing."""
    codes = [0]
    for digit in range(1, BASE + 1):
        stored = np.unique(write(operand, np.full(shape, digit, dtype=np.int64)))
        stored = stored[stored != 0]
        if len(stored) != 1 or int(stored[0]) in codes:
            raise UnsupportedError(f"the CPU attention does not store {operand} {digit} as one code: {stored[:4]}")
        codes.append(int(stored[0]))
    return np.array(codes, dtype=np.int64)


def _indices(write: Write, operand: str, codes: NDArray[np.int64], index: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each position the index that was stored there, or -1 where nothing was."""
    total: NDArray[np.int64] | None = None
    weight, left = 1, np.asarray(index, dtype=np.int64)
    order = np.argsort(codes)
    while total is None or left.any():
        stored = write(operand, left % BASE + 1)
        digit = order[np.clip(np.searchsorted(codes[order], stored), 0, BASE)]
        if not np.array_equal(codes[digit], stored):
            raise UnsupportedError(f"the CPU attention stores codes of {operand} that it was not given")
        part = np.where(digit > 0, (digit - 1) * weight, 0)
        total = np.where(digit > 0, 0, -1) + part if total is None else total + part
        weight, left = weight * BASE, left // BASE
    return total


def spans(offsets: tuple[int, ...], *, start: int, offset_bytes: int, item_bytes: int) -> tuple[Span, ...]:
    """Return spans for coordinates from ``start`` whose element offsets are given, longest affine pieces first to last.

    >>> [(s.start, s.stop, s.stride_bytes) for s in spans((0, 1, 32, 33), start=0, offset_bytes=0, item_bytes=2)]
    [(0, 2, 2), (2, 4, 2)]
    """
    out, at = [], 0
    while at < len(offsets):
        end = at + 1
        step = offsets[end] - offsets[at] if end < len(offsets) else 0
        while end < len(offsets) and offsets[end] - offsets[end - 1] == step:
            end += 1
        out.append(Span(start + at, start + end, offset_bytes + offsets[at] * item_bytes, step * item_bytes))
        at = end
    return tuple(out)
