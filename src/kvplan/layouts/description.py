"""Engine descriptions: the YAML files that people write, read into an :class:`EngineSpec` and written back.

``docs/descriptions.md`` is the reference of every field. What a layer means is in its own file; nothing is planned.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from kvplan.errors import DescriptionError
from kvplan.layouts.attention import AttentionSpec
from kvplan.layouts.document import Document, build, check_keys, load, mapping, sequence
from kvplan.layouts.engine import EngineSpec, LayerSpec, decoder_index
from kvplan.layouts.formats import dtype_name
from kvplan.layouts.gdn import GdnSpec
from kvplan.layouts.geometry import CacheGeometry, GroupGeometry
from kvplan.layouts.hf_config import ModelSpec, read_hf_config
from kvplan.layouts.hybrid import BLOCK_ALIGNMENT, automatic_block_size
from kvplan.layouts.indexer import IndexerSpec
from kvplan.layouts.mamba1 import Mamba1Spec
from kvplan.layouts.mamba2 import Mamba2Spec
from kvplan.layouts.mla import LatentSpec
from kvplan.layouts.names import contract, expand, template
from kvplan.layouts.parallel import Parallel
from kvplan.layouts.sliding_window import SlidingWindowSpec

KINDS: dict[str, type[LayerSpec]] = {
    cls.kind: cls
    for cls in (AttentionSpec, SlidingWindowSpec, LatentSpec, Mamba1Spec, Mamba2Spec, GdnSpec, IndexerSpec)
}
"""Kinds of layers, by the name that a description gives them."""

LAYER_ALIASES = {
    "optional": "draft",
    "layer_index": "index",
    "head_size": "head_dim",
    "index_head_dim": "head_dim",
    "sliding_window": "window",
    "conv_dtype": "dtype",
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), "num_heads"),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), "head_dim"),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), "num_groups"),
    **dict.fromkeys(("d_state", "ssm_state_size", "mamba_d_state"), "state_size"),
    **dict.fromkeys(("d_conv", "conv_kernel_size", "mamba_d_conv", "linear_conv_kernel_dim"), "conv_kernel"),
    **dict.fromkeys(("num_key_heads", "linear_num_key_heads"), "num_k_heads"),
    **dict.fromkeys(("num_value_heads", "linear_num_value_heads"), "num_v_heads"),
    **dict.fromkeys(("key_head_dim", "linear_key_head_dim"), "head_k_dim"),
    **dict.fromkeys(("value_head_dim", "linear_value_head_dim"), "head_v_dim"),
}
"""Other names of fields: those of Hugging Face configs."""
PARALLEL_ALIASES = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "decode_context_parallel_size": "dcp",
    "cp_kv_cache_interleave_size": "dcp_interleave",
}
CACHE_ALIASES = {
    "kv_cache_dtype": "dtype",
    "cache_dtype": "dtype",
    "mamba_cache_dtype": "conv_dtype",
    "mamba_ssm_cache_dtype": "ssm_dtype",
    "ssm_conv_state_layout": "conv_layout",
    "hybrid_memory": "shared_regions",
}


def read_description(path: Path | str) -> EngineSpec:
    """Return the engine that a YAML file describes. Raises DescriptionError with file, line and field."""
    document = load(Path(path))
    try:
        return _engine(document, Path(path).parent)
    except DescriptionError as error:
        raise document.located(error) from None


def _engine(document: Document, folder: Path) -> EngineSpec:
    data = mapping(document.data, "")
    check_keys(data, ["engine_id", "model", "parallel", "cache"], "")
    if "model" not in data:
        raise DescriptionError("model must be given: hf_config: PATH, or layers", field="")
    engine_id = data.get("engine_id", Path(document.file).stem)
    if not isinstance(engine_id, (str, int)) or isinstance(engine_id, bool) or not str(engine_id):
        raise DescriptionError(f"{engine_id!r} is not a name", field="engine_id")
    model = _model(mapping(data["model"], "model"), folder)
    parallel = build(Parallel, mapping(data.get("parallel") or {}, "parallel"), "parallel", aliases=PARALLEL_ALIASES)
    cache = _cache(mapping(data.get("cache") or {}, "cache"), model, parallel)
    return EngineSpec(
        engine_id=str(engine_id),
        layers=model.layers,
        num_layers=model.num_layers,
        parallel=parallel,
        cache=cache,
        model=model.name,
        identity=model.identity,
    )


def _model(data: dict[str, Any], folder: Path) -> ModelSpec:
    check_keys(data, ["hf_config", "layers", "name", "num_layers", "dtype"], "model")
    dtype = data.get("dtype")
    if dtype is not None:
        dtype = dtype_name(str(dtype), field="model.dtype")
    found = ModelSpec()
    if "hf_config" in data:
        if not isinstance(data["hf_config"], str):
            raise DescriptionError(f"{data['hf_config']!r} is not a path", field="model.hf_config")
        found = read_hf_config(_config_path(folder, data["hf_config"]), dtype=dtype)
    elif "layers" not in data:
        raise DescriptionError("hf_config: PATH or layers must be given", field="model")
    entries = sequence(data.get("layers", []), "model.layers")
    extra = [layer for i, entry in enumerate(entries) for layer in _layers(entry, f"model.layers.{i}", dtype)]
    layers = tuple(sorted((*found.layers, *extra), key=lambda layer: (layer.draft, decoder_index(layer), layer.group)))
    least = max((decoder_index(layer) + 1 for layer in layers if not layer.draft), default=1)
    count = data.get("num_layers", max(found.num_layers, least))
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise DescriptionError(f"{count!r} is too few; the layers' names count up to {least}", field="model.num_layers")
    name = str(data.get("name", found.name))
    return dataclasses.replace(found, name=name, layers=layers, num_layers=count)


def _config_path(folder: Path, text: str) -> Path:
    """Return the path that a description in this folder names; one that is there from here will do too."""
    for path in (folder / text, Path(text)):
        if path.exists():
            return path
    raise DescriptionError(
        f"{str(folder / text)!r} is not there; a path is relative to this file", field="model.hf_config"
    )


def _layers(entry: Any, field: str, dtype: str | None) -> list[LayerSpec]:
    data = mapping(entry, field)
    kind = str(data.pop("kind", "")).strip().lower().replace("-", "_")
    if kind not in KINDS:
        raise DescriptionError(f"{kind!r} is not a kind of layer; allowed: {', '.join(KINDS)}", field=f"{field}.kind")
    for key in ("dtype", "ssm_dtype", "conv_dtype"):
        if key in data:
            data[key] = dtype_name(str(data[key]), field=f"{field}.{key}")
    if dtype is not None and kind != "indexer" and not data.keys() & {"dtype", "conv_dtype"}:
        data["dtype"] = dtype
    first: LayerSpec = build(KINDS[kind], data, field, aliases=LAYER_ALIASES)
    if getattr(first, "conv_kernel", 2) < 2:
        raise DescriptionError("conv_kernel is 1; a convolution state keeps conv_kernel - 1 inputs", field=field)
    try:
        names = expand(first.name)
    except DescriptionError as error:
        raise DescriptionError(str(error), field=f"{field}.name") from None
    return [dataclasses.replace(first, name=name) for name in names]


def _cache(data: dict[str, Any], model: ModelSpec, parallel: Parallel) -> CacheGeometry:
    automatic = str(data.get("block_size", "")).lower() == "auto"
    if automatic:
        data["block_size"] = data.get("kernel_block_size", BLOCK_ALIGNMENT)
    for key in ("dtype", "kv_cache_dtype", "cache_dtype", "scale_dtype", "conv_dtype", "ssm_dtype"):
        if key in data and str(data[key]).lower() != "auto":
            data[key] = dtype_name(str(data[key]), field=f"cache.{key}")
    groups = data.pop("groups", {})
    entries = mapping(groups, "cache.groups") if groups else {}
    own = tuple(_group(key, entry) for key, entry in entries.items())
    plain = build(CacheGeometry, data, "cache", aliases=CACHE_ALIASES)
    shared = plain.shared_regions if data.keys() & {"shared_regions", "hybrid_memory"} else automatic
    whole = dataclasses.replace(plain, groups=own, shared_regions=shared)
    if not automatic:
        return whole
    return dataclasses.replace(whole, block_size=automatic_block_size(model.layers, parallel, whole))


def _values(item: Any) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}


def _group(key: str, entry: Any) -> GroupGeometry:
    field = f"cache.groups.{key}"
    if not key.isdigit():
        raise DescriptionError(f"{key!r} is not a group; groups are numbers from 0 on", field=field)
    return build(GroupGeometry, {"group": int(key), **mapping(entry, field)}, field)


def write_description(spec: EngineSpec) -> str:
    """Return the YAML text that reads back as this engine, with explicit layers."""
    cache = _changed(spec.cache, CacheGeometry())
    cache.update({name: getattr(spec.cache, name) for name in ("block_size", "num_blocks", "kv_layout", "kv_packing")})
    cache["shared_regions"] = spec.cache.shared_regions
    if spec.cache.groups:
        cache["groups"] = {
            item.group: {k: v for k, v in _changed(item, GroupGeometry(item.group)).items() if k != "group"}
            for item in spec.cache.groups
        }
    parallel = _changed(spec.parallel, Parallel()) | {"tp": spec.parallel.tp}
    if spec.parallel.pp_layers:
        parallel["pp_layers"] = list(spec.parallel.pp_layers)
    model: dict[str, Any] = {"name": spec.model} if spec.model else {}
    model |= {"num_layers": spec.num_layers, "layers": _written_layers(spec.layers)}
    text = {"engine_id": spec.engine_id, "model": model, "parallel": parallel, "cache": cache}
    return yaml.safe_dump(text, sort_keys=False, default_flow_style=None, width=120)


def _changed(item: Any, plain: Any) -> dict[str, Any]:
    return {name: value for name, value in _values(item).items() if value != getattr(plain, name)}


def _written_layers(layers: tuple[LayerSpec, ...]) -> list[dict[str, Any]]:
    alike: dict[tuple[str, LayerSpec], list[int]] = {}
    entries: list[tuple[str, LayerSpec, list[int]]] = []
    for layer in layers:
        pattern, number = template(layer.name)
        numbered = number is not None and layer.index in {None, number}
        key = (pattern, dataclasses.replace(layer, name="", index=None if numbered else layer.index))
        if numbered and key in alike and number is not None:
            alike[key].append(number)
            continue
        numbers = [number] if number is not None else []
        entries.append((pattern, key[1], numbers))
        if numbered:
            alike[key] = numbers
    return [
        _written_layer(contract(pattern, numbers) if numbers else pattern, layer) for pattern, layer, numbers in entries
    ]


def _written_layer(name: str, layer: LayerSpec) -> dict[str, Any]:
    kept = {key: x for key, x in _values(layer).items() if x is not None and key != "name" and (key != "draft" or x)}
    return {"name": name, "kind": layer.kind, **kept}
