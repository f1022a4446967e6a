"""Hugging Face ``config.json`` -> layers with a cache, named and grouped as vLLM 0.32 does. No parallelism.

Layer names are vLLM's module names, because a running engine describes itself with those. A family that is not
listed in ``FAMILIES`` is refused by name; explicit ``layers`` describe any other model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplan.errors import DescriptionError, UnsupportedError
from kvplan.layouts.document import load, shown
from kvplan.layouts.formats import dtype_name
from kvplan.layouts.groups import assign_groups
from kvplan.layouts.hf_families import FAMILIES, Config

if TYPE_CHECKING:
    from pathlib import Path

    from kvplan.layouts.engine import LayerSpec


NO_IDENTITY = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "auto_map",
        "dtype",
        "model_path",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "head_dim",
        "num_hidden_layers",
        "num_key_value_heads",
        "sliding_window",
    }
)
"""Keys that say where a model came from or how to run it, and those whose difference layouts show."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as far as its cache goes."""

    name: str = ""
    layers: tuple[LayerSpec, ...] = ()
    num_layers: int = 0
    """Decoder layers, those without a cache included."""
    identity: tuple[tuple[str, str], ...] = ()
    """What the config says besides: (key, value as JSON). The same cache from another model is another cache."""


def read_hf_config(path: Path, *, dtype: str | None = None) -> ModelSpec:
    """Return the model of a ``config.json`` (or of the folder that holds one); ``dtype`` overrides the config's."""
    document = load(path / "config.json" if path.is_dir() else path)
    if not isinstance(document.data, dict):
        raise document.located(DescriptionError("not a model config: a JSON object is expected"))
    try:
        return model_spec(document.data, dtype=dtype)
    except DescriptionError as error:
        raise document.located(error) from None
    except UnsupportedError as error:
        raise UnsupportedError(f"{document.file}:{document.line('model_type')}: {error}") from None


def model_spec(data: dict[str, Any], *, dtype: str | None = None) -> ModelSpec:
    """Return the model of a parsed ``config.json``."""
    config = Config(_language_part(data), dtype or _dtype(data))
    family = next((name for name in _family_names(data) if name in FAMILIES), None)
    if family is None:
        raise UnsupportedError(
            f"model_type: {shown(data.get('model_type'))} is not known; known: {', '.join(sorted(FAMILIES))}; "
            "any other model can be described with explicit layers"
        )
    prefix = "language_model." if config.data is not data else ""
    layers, num_layers = FAMILIES[family](config, prefix)
    name = str(data.get("_name_or_path") or family)
    return ModelSpec(name, assign_groups(layers), num_layers, _identity(config.data))


def _identity(data: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    kept = sorted(key for key in data if key not in NO_IDENTITY)
    return tuple((key, json.dumps(data[key], sort_keys=True)) for key in kept)


def _language_part(data: dict[str, Any]) -> dict[str, Any]:
    text = data.get("text_config")
    return text if isinstance(text, dict) else data


def _family_names(data: dict[str, Any]) -> list[str]:
    """Return the names that may say which family it is, the language model's own first."""
    parts = (_language_part(data), data)
    return [str(x.get("model_type") or _family_of_class(x.get("architectures"))) for x in parts]


def _family_of_class(architectures: object) -> str:
    """Return the family whose name a class name spells: ``Qwen3MoeForCausalLM`` is ``qwen3_moe``."""
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    spelled = first.partition("For")[0].lower()
    return next((name for name in FAMILIES if name.replace("_", "") == spelled), "")


def _dtype(data: dict[str, Any]) -> str:
    for part in (_language_part(data), data):
        for key in ("torch_dtype", "dtype"):
            if isinstance(part.get(key), str) and part[key] != "auto":
                return dtype_name(part[key], field=key)
    return "bfloat16"
