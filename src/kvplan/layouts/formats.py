"""Element types of a cache: names, sizes, format tags. No layers, no bytes of a block.

A format tag names the element type and how many of them make one atom: ``bfloat16[128]``, or ``float32`` for one.
"""

from __future__ import annotations

from kvplan.errors import DescriptionError

ITEM_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8_ds_mla": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element. ``fp8_ds_mla`` counts the bytes of a row that mixes types (vLLM 0.32, FlashMLA sparse)."""

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def dtype_name(text: str, *, field: str = "dtype") -> str:
    """Return the canonical name of an element type.

    >>> dtype_name("torch.BF16")
    'bfloat16'
    """
    name = text.strip().lower().removeprefix("torch.").replace("-", "_")
    name = _ALIASES.get(name, name)
    if name not in ITEM_BYTES:
        known = ", ".join(sorted({*ITEM_BYTES, *_ALIASES}))
        raise DescriptionError(f"{text!r} is not an element type; allowed: {known}", field=field)
    return name


def format_tag(dtype: str, count: int) -> str:
    """Return the format tag of an atom of ``count`` elements.

    >>> format_tag("bfloat16", 128), format_tag("float32", 1)
    ('bfloat16[128]', 'float32')
    """
    return dtype if count == 1 else f"{dtype}[{count}]"
