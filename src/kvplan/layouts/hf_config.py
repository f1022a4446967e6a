"""Hugging Face ``config.json`` -> layers with a cache, named and grouped as vLLM 0.32 does. No parallelism.

Layer names are vLLM's module names, because a running engine describes itself with those. A family that is not
listed in ``FAMILIES`` is refused by name; explicit ``layers`` describe any other model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplan.errors import DescriptionError, UnsupportedError
from kvplan.layouts.document import load
from kvplan.layouts.formats import dtype_name
from kvplan.layouts.groups import assign_groups
from kvplan.layouts.hf_families import FAMILIES, Config

if TYPE_CHECKING:
    from pathlib import Path

    from kvplan.layouts.engine import LayerSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as far as its cache goes."""

    name: str = ""
    layers: tuple[LayerSpec, ...] = ()
    num_layers: int = 0
    """Decoder layers, those without a cache included."""


def read_hf_config(path: Path, *, dtype: str | None = None) -> ModelSpec:
    """Return the model of a ``config.json`` (or of the folder that holds one); ``dtype`` overrides the config's."""
    document = load(path / "config.json" if path.is_dir() else path)
    if not isinstance(document.data, dict):
        raise document.located(DescriptionError("not a model config: a JSON object is expected"))
    try:
        return model_spec(document.data, dtype=dtype)
    except DescriptionError as error:
        raise document.located(error) from None


def model_spec(data: dict[str, Any], *, dtype: str | None = None) -> ModelSpec:
    """Return the model of a parsed ``config.json``."""
    config = Config(_language_part(data), dtype or _dtype(data))
    family = next((name for name in _family_names(data) if name in FAMILIES), None)
    if family is None:
        raise UnsupportedError(
            f"model_type {data.get('model_type')!r} is not known; known: {', '.join(sorted(FAMILIES))}; "
            "any other model can be described with explicit layers"
        )
    prefix = "language_model." if config.data is not data else ""
    layers, num_layers = FAMILIES[family](config, prefix)
    return ModelSpec(str(data.get("_name_or_path") or family), assign_groups(layers), num_layers)


def _language_part(data: dict[str, Any]) -> dict[str, Any]:
    text = data.get("text_config")
    return text if isinstance(text, dict) else data


def _family_names(data: dict[str, Any]) -> list[str]:
    """Return the names that may say which family it is, the language model's own first."""
    return [str(x.get("model_type", "")) for x in (_language_part(data), data)]


def _dtype(data: dict[str, Any]) -> str:
    for part in (_language_part(data), data):
        for key in ("torch_dtype", "dtype"):
            if isinstance(part.get(key), str) and part[key] != "auto":
                return dtype_name(part[key], field=key)
    return "bfloat16"
