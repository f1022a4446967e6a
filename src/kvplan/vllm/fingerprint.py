"""What two vLLM engines must have in common, as named text. No layouts: those are proved against each other.

The model is known by its configuration (architecture and geometry), never by its path or name: the same model under
another path is the same model. Names that start with ``info.`` are shown, not compared (``kvplan.wire.compatibility``).
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from kvplan.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvplan.vllm.settings import Settings

VOLATILE = (
    "_attn_implementation",
    "_attn_implementation_internal",
    "_commit_hash",
    "_name_or_path",
    "auto_map",
    "dtype",
    "model_path",
    "name_or_path",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Keys of a model configuration that say where it came from or how to run it, not what it is."""

_NAMED = {
    "model.architecture": ("architectures",),
    "model.type": ("model_type",),
    "model.hidden_size": ("hidden_size", "d_model"),
    "model.layers": ("num_hidden_layers", "n_layer"),
    "model.attention_heads": ("num_attention_heads", "num_heads"),
    "model.kv_heads": ("num_key_value_heads",),
    "model.head_dim": ("head_dim",),
    "model.vocabulary": ("vocab_size",),
    "model.window": ("sliding_window",),
}
"""Fields that are compared one by one, so that a mismatch says what differs, and the keys that they are read from."""


def compatibility(vllm_config: Any, settings: Settings, modules: Iterable[Any] = ()) -> dict[str, str]:
    """Return the named fields of one engine. ``modules`` are its attention layers, which hold the cache's scales."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedError("--calculate-kv-scales makes scales that differ between engines; use the checkpoint's")
    config = model.hf_text_config.to_dict()
    fields = {name: _text(config, keys) for name, keys in _NAMED.items()}
    fields["model.digest"] = config_digest(config)
    fields["cache_dtype"] = cache_dtype(cache.cache_dtype, model.dtype)
    fields["cache_scales"] = scales_text(modules) if fields["cache_dtype"].startswith("fp8") else "none"
    fields["mode"] = "pull"
    fields["transport"] = settings.transport
    speculative = vllm_config.speculative_config
    fields["info.speculative"] = "none" if speculative is None else str(speculative.method)
    fields["info.model"] = str(model.model)
    fields["info.dtype"] = str(model.dtype).removeprefix("torch.")
    fields["info.tp"] = str(vllm_config.parallel_config.tensor_parallel_size)
    fields["info.block_size"] = str(cache.block_size)
    return fields


def cache_dtype(name: str, model_dtype: object) -> str:
    """Return the element type of attention caches, ``auto`` resolved.

    >>> cache_dtype("auto", "torch.bfloat16"), cache_dtype("fp8", "torch.bfloat16")
    ('bfloat16', 'fp8_e4m3')
    """
    if name == "auto":
        return str(model_dtype).removeprefix("torch.")
    return "fp8_e4m3" if name == "fp8" else name


def config_digest(config: dict[str, Any]) -> str:
    """Return a digest of a model configuration without its volatile keys, at any depth.

    >>> config_digest({"hidden_size": 8, "_name_or_path": "/a"}) == config_digest({"hidden_size": 8})
    True
    """
    text = json.dumps(_stable(config), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _stable(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    return value


def _text(config: dict[str, Any], keys: tuple[str, ...]) -> str:
    value = next((config[key] for key in keys if config.get(key) is not None), "none")
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def scales_text(modules: Iterable[Any]) -> str:
    """Return ``1.0`` when every cache scale is one, else a digest of the layers' scales."""
    scales = [
        (str(getattr(module, "layer_name", "")), float(module._k_scale_float), float(module._v_scale_float))  # noqa: SLF001
        for module in modules
        if hasattr(module, "_k_scale_float")
    ]
    if all(key == value == 1.0 for _, key, value in scales):
        return "1.0"
    return hashlib.blake2b(repr(sorted(scales)).encode(), digest_size=16).hexdigest()
