"""From vLLM's configuration, KV cache groups and registered tensors to one rank's layout. Moves nothing, knows no peer.

1. Every layer of a group that takes part in transfers gives a ``LayerCache``: address, shape, strides. Layers that
   share another layer's cache add nothing.
2. The group's spec says which kind it is; ``describe_attention`` or ``describe_state`` declares its components from
   the tensor's strides. What neither recognises is refused here, at start-up, by layer, shape, strides and backend.
3. ``Regions`` finds the distinct memory ranges; the rank layout proves that nothing aliases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvplan.errors import UnsupportedError
from kvplan.layouts.page import BlockShape
from kvplan.planner import BlockLayout, ComponentLayout, RankLayout
from kvplan.vllm.caches import LayerCache, Regions, layer_cache
from kvplan.vllm.describe_attention import Attention, attention_blocks, latent_blocks
from kvplan.vllm.describe_state import State, state_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvplan.layouts.parallel import Place

    Describer = Callable[[Any, LayerCache, Any, Any, Place], dict[str, BlockLayout]]


@dataclass(frozen=True, slots=True)
class Description:
    """One rank's layout and the tensors that it speaks of."""

    layout: RankLayout
    caches: dict[str, LayerCache]


def describe(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], place: Place) -> Description:
    """Return the layout of one rank. Raises ``UnsupportedError`` that names what is not recognised."""
    modules = vllm_config.compilation_config.static_forward_context
    regions, caches, components = Regions(), {}, []
    for layer, group in kv_cache_config.transfer_group_index_by_layer.items():
        module = modules.get(layer)
        if layer not in kv_caches or getattr(module, "kv_sharing_target_layer_name", None) is not None:
            continue
        spec = _layer_spec(kv_cache_config.transfer_groups[group].kv_cache_spec, layer)
        backend = module.get_attn_backend().get_name() if hasattr(module, "get_attn_backend") else ""
        cache = layer_cache(layer, kv_caches[layer], num_blocks=kv_cache_config.num_blocks, backend=backend)
        region, inside = regions.place(cache)
        caches[layer] = cache
        draft = is_draft(vllm_config, layer)
        components += [
            ComponentLayout(layer, name, group, region, _moved(block, inside), optional=draft)
            for name, block in _layer_blocks(vllm_config, cache, spec, module, place).items()
        ]
    if not components:
        raise UnsupportedError("vLLM registered no KV cache that takes part in transfers")
    layout = RankLayout(regions.all(), tuple(components), tp=place.tp_rank, pp=place.pp_rank, dcp=place.dcp_rank)
    return Description(layout, caches)


def _moved(block: BlockLayout, offset_bytes: int) -> BlockLayout:
    return replace(block, base_bytes=block.base_bytes + offset_bytes) if offset_bytes else block


def _layer_spec(group_spec: Any, layer: str) -> Any:
    """Return the layer's own spec; groups of one type keep one per layer."""
    specs = getattr(group_spec, "kv_cache_specs", None)
    return group_spec if specs is None else specs[layer]


def _layer_blocks(vllm_config: Any, cache: LayerCache, spec: Any, module: Any, place: Place) -> dict[str, BlockLayout]:
    """Return the components of one layer, by the exact class of its spec: a subclass may store something else."""
    kind = type(spec).__name__
    if kind not in _KINDS:
        raise cache.refuse(f"caches of kind {kind} are not known; known: {', '.join(_KINDS)}")
    return _KINDS[kind](vllm_config, cache, spec, module, place)


def _block_shape(vllm_config: Any, cache: LayerCache, spec: Any, place: Place) -> BlockShape:
    parallel = vllm_config.parallel_config
    dcp = place.dcp if spec.dcp_sharded else 1
    interleave = getattr(parallel, "cp_kv_cache_interleave_size", 1)
    rank = place.dcp_rank if dcp > 1 else 0
    return BlockShape(spec.block_size, cache.shape[2], dcp=dcp, dcp_rank=rank, interleave=interleave)


def _attention(vllm_config: Any, cache: LayerCache, spec: Any, module: Any, place: Place) -> dict[str, BlockLayout]:
    _check_dense(cache, spec)
    if spec.num_head_slots is not None or spec.state_content_bytes is not None:
        raise cache.refuse("its backend packs rows in a way of its own")
    layer = Attention(
        num_kv_heads=_num_kv_heads(vllm_config, cache, place),
        head_dim=spec.head_size,
        head_dim_v=spec.head_size_v,
        cache_dtype=cache_dtype(vllm_config, cache.dtype),
        isa=_isa(vllm_config, spec, cache, module),
        model_dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        kv_cache_dtype=vllm_config.cache_config.cache_dtype,
    )
    return attention_blocks(cache, layer, place, _block_shape(vllm_config, cache, spec, place))


def _latent(vllm_config: Any, cache: LayerCache, spec: Any, module: Any, place: Place) -> dict[str, BlockLayout]:
    _check_dense(cache, spec)
    role = getattr(spec.cache_role, "value", "sparse")
    if role != "sparse":
        raise cache.refuse(f"a latent cache with the role {role} is not known")
    text = spec.cache_dtype_str if spec.cache_dtype_str == "fp8_ds_mla" else cache_dtype(vllm_config, cache.dtype)
    return latent_blocks(cache, text, _block_shape(vllm_config, cache, spec, place), "latent")


def _check_dense(cache: LayerCache, spec: Any) -> None:
    """Refuse caches whose rows carry more than elements: per-token scales, compressed or packed formats."""
    mode = spec.kv_quant_mode.name
    if mode not in {"NONE", "FP8_PER_TENSOR"}:
        raise cache.refuse(f"cache quantization {mode} is not known; NONE and FP8_PER_TENSOR work")
    if spec.tokens_per_state != 1:
        raise cache.refuse(f"it stores one state for {spec.tokens_per_state} tokens")


def _state(vllm_config: Any, cache: LayerCache, spec: Any, module: Any, place: Place) -> dict[str, BlockLayout]:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    config = vllm_config.model_config.hf_text_config
    state = State(
        kind=spec.mamba_type.name,
        shapes=tuple(tuple(shape) for shape in spec.shapes),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        dim_first=is_conv_state_dim_first(),
        num_groups=_first_number(config, "mamba_n_groups", "n_groups", "mamba_ngroups"),
        num_key_heads=_first_number(config, "linear_num_key_heads"),
        tp_replicated=spec.tp_replicated,
    )
    return state_blocks(cache, state, place)


def _first_number(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _num_kv_heads(vllm_config: Any, cache: LayerCache, place: Place) -> int:
    """Return the KV heads of the whole model: on one rank those that are here, else what the configuration says."""
    if place.tp == 1:
        return cache.shape[1]
    return int(vllm_config.model_config.get_total_num_kv_heads())


def _isa(vllm_config: Any, spec: Any, cache: LayerCache, module: Any) -> str:
    """Return the instruction set that the CPU attention chose for the layer; empty for other backends."""
    if cache.backend != "CPU_ATTN":
        return ""
    isa = getattr(module, "isa", None)
    if isa is not None:
        return str(isa)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_config = vllm_config.cache_config
    return str(_get_attn_isa(vllm_config.model_config.dtype, cache.shape[2], spec.head_size, cache_config.cache_dtype))


def cache_dtype(vllm_config: Any, torch_dtype: str) -> str:
    """Return the element type of attention caches by name; fp8 lies in tensors of uint8."""
    name = str(vllm_config.cache_config.cache_dtype)
    return name if name.startswith("fp8") else torch_dtype


def is_draft(vllm_config: Any, layer: str) -> bool:
    """Return whether a layer belongs to a draft model: its decoder layer lies behind the model's own."""
    if vllm_config.speculative_config is None:
        return False
    numbers = [int(part) for part in layer.split(".") if part.isdigit()]
    total = int(vllm_config.model_config.get_total_num_hidden_layers())
    return "draft" in layer or bool(numbers and numbers[0] >= total)


_KINDS: dict[str, Describer] = {
    "ChunkedLocalAttentionSpec": _attention,
    "FullAttentionSpec": _attention,
    "MLAAttentionSpec": _latent,
    "MambaSpec": _state,
    "SlidingWindowSpec": _attention,
}
"""Who describes which of vLLM's KV cache specs."""
