"""What each model family's config says about its cache: one short function a family. No files, no groups.

Each returns (layers with a cache in vLLM 0.32's order of construction, number of decoder layers). Where a config leaves
a value out, the default is the one of the family's class in ``transformers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kvplan.errors import DescriptionError
from kvplan.layouts.attention import AttentionSpec
from kvplan.layouts.formats import dtype_name
from kvplan.layouts.gdn import GdnSpec
from kvplan.layouts.indexer import IndexerSpec
from kvplan.layouts.mamba1 import Mamba1Spec
from kvplan.layouts.mamba2 import Mamba2Spec
from kvplan.layouts.mla import LatentSpec
from kvplan.layouts.sliding_window import SlidingWindowSpec

if TYPE_CHECKING:
    from kvplan.layouts.engine import LayerSpec

Family: TypeAlias = "Callable[[Config, str], tuple[list[LayerSpec], int]]"

WINDOW = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Config:
    """A parsed config with checked access."""

    data: dict[str, Any]
    dtype: str

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the first of these fields that is given, a whole number from 1 on."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DescriptionError(f"{value!r} is not a whole number from 1 on", field=name)
            return value
        if default is None:
            raise DescriptionError(f"{' or '.join(names)} must be given", field=names[0])
        return default

    def types(self, *names: str, num_layers: int) -> list[str] | None:
        """Return the first of these lists that is given: one kind per decoder layer."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if not isinstance(value, list) or len(value) != num_layers:
                raise DescriptionError(f"it must list the kinds of {num_layers} layers", field=name)
            return [str(item) for item in value]
        return None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.count("num_hidden_layers", "n_layer")

    def head_dim(self, default: int | None = None) -> int:
        """Return the elements of one attention head."""
        if self.data.get("head_dim") is None and self.data.get("attention_head_dim") is None and default is None:
            return self.count("hidden_size") // self.count("num_attention_heads")
        return self.count("head_dim", "attention_head_dim", default=default)

    def attention(
        self,
        name: str,
        index: int,
        *,
        window: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
    ) -> LayerSpec:
        """Return one attention layer; ``kv_heads`` and ``head_dim`` are defaults."""
        heads = self.count("num_key_value_heads", default=kv_heads or self.data.get("num_attention_heads"))
        size = self.head_dim(head_dim)
        if window is None:
            return AttentionSpec(name=name, num_kv_heads=heads, head_dim=size, dtype=self.dtype, index=index)
        return SlidingWindowSpec(
            name=name, num_kv_heads=heads, head_dim=size, dtype=self.dtype, index=index, window=window
        )

    def mamba2(self, name: str, index: int, *, ssm_dtype: str | None = None) -> LayerSpec:
        """Return one Mamba2 layer; families differ in what they call its sizes."""
        heads = self.count("mamba_n_heads", "mamba_num_heads", "num_heads")
        return Mamba2Spec(
            name=name,
            num_heads=heads,
            head_dim=self._mamba_head_dim(heads),
            state_size=self.count("mamba_d_state", "ssm_state_size", "state_size"),
            num_groups=self.count("mamba_n_groups", "n_groups", default=1),
            conv_kernel=self.count("mamba_d_conv", "conv_kernel", default=4),
            dtype=self.dtype,
            ssm_dtype=ssm_dtype or self.dtype,
            index=index,
        )

    def _mamba_head_dim(self, heads: int) -> int:
        if self.data.get("mamba_d_head") == "auto":
            return self.count("mamba_expand", default=2) * self.count("hidden_size") // heads
        names = ["mamba_d_head", "mamba_head_dim"]
        if "num_heads" in self.data:
            names.append("head_dim")
        return self.count(*names)


def _plain(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    """Llama, Mistral, Qwen and their mixtures: one kind of attention, or a list of kinds."""
    n = config.num_layers
    window = config.data.get("sliding_window")
    if config.data.get("use_sliding_window") is False:
        window = None
    first = config.count("max_window_layers", default=0) if window else n
    types = config.types("layer_types", num_layers=n) or [WINDOW if i >= first else "full" for i in range(n)]
    names = [f"{prefix}model.layers.{i}.self_attn.attn" for i in range(n)]
    return [
        config.attention(names[i], i, window=window if types[i] == WINDOW and window else None) for i in range(n)
    ], n


def _gemma2(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    return _gemma(config, prefix, pattern=2, layers=26, window=4096)


def _gemma3(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    return _gemma(config, prefix, pattern=config.count("sliding_window_pattern", default=6), layers=26, window=4096)


def _gemma(config: Config, prefix: str, *, pattern: int, layers: int, window: int) -> tuple[list[LayerSpec], int]:
    """Windows, and every ``pattern``-th layer full."""
    n = config.count("num_hidden_layers", default=layers)
    size = config.count("sliding_window", default=window)
    types = config.types("layer_types", num_layers=n) or [WINDOW if (i + 1) % pattern else "full" for i in range(n)]
    return [
        config.attention(
            f"{prefix}model.layers.{i}.self_attn.attn",
            i,
            window=size if types[i] == WINDOW else None,
            kv_heads=4,
            head_dim=256,
        )
        for i in range(n)
    ], n


def _gpt_oss(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    """Windows on even layers, whatever the config lists (vLLM's ``gpt_oss.py``)."""
    n = config.num_layers
    size = config.count("sliding_window", default=128)
    return [
        config.attention(f"{prefix}model.layers.{i}.attn.attn", i, window=None if i % 2 else size, head_dim=64)
        for i in range(n)
    ], n


def _deepseek(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    """Latent rows; V3.2 keeps an indexer's keys beside them."""
    n = config.num_layers
    latent = config.count("kv_lora_rank") + config.count("qk_rope_head_dim")
    layers: list[LayerSpec] = []
    for i in range(n):
        name = f"{prefix}model.layers.{i}.self_attn"
        layers.append(LatentSpec(name=f"{name}.attn", latent_dim=latent, dtype=config.dtype, index=i))
        if config.data.get("index_topk") is not None:
            keys = config.count("index_head_dim", default=128)
            layers.append(IndexerSpec(name=f"{name}.indexer.k_cache", head_dim=keys, quant_block_size=128, index=i))
    return layers, n


def _jamba(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    n = config.num_layers
    period = config.count("attn_layer_period", default=8)
    offset = config.data.get("attn_layer_offset", 4)
    inner = config.count("mamba_expand", default=2) * config.count("hidden_size")
    layers: list[LayerSpec] = []
    for i in range(n):
        name = f"{prefix}model.layers.{i}"
        if i % period == offset:
            layers.append(config.attention(f"{name}.attn", i))
        else:
            layers.append(
                Mamba1Spec(
                    name=f"{name}.mixer",
                    intermediate_size=inner,
                    state_size=config.count("mamba_d_state", default=16),
                    conv_kernel=config.count("mamba_d_conv", default=4),
                    dtype=config.dtype,
                    ssm_dtype=config.dtype,
                    index=i,
                )
            )
    return layers, n


def _bamba(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    n = config.num_layers
    full = config.data.get("attn_layer_indices") or []
    return _mixed(config, prefix, ["attention" if i in full else "mamba" for i in range(n)])


def _granite_hybrid(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    n = config.num_layers
    return _mixed(config, prefix, config.types("layer_types", "layers_block_type", num_layers=n) or ["mamba"] * n)


def _mixed(config: Config, prefix: str, types: list[str]) -> tuple[list[LayerSpec], int]:
    """Mamba2 layers with attention in between."""
    return [
        config.attention(f"{prefix}model.layers.{i}.self_attn.attn", i)
        if "attention" in kind
        else config.mamba2(f"{prefix}model.layers.{i}.mixer", i)
        for i, kind in enumerate(types)
    ], len(types)


def _nemotron_h(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    """``hybrid_override_pattern``: M is Mamba2, * attention; - and E have no cache. State is float32 unless said."""
    pattern = config.data.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        names = config.data.get("layers_block_type")
        if not isinstance(names, list):
            raise DescriptionError("it must be given, as 'M-M*'", field="hybrid_override_pattern")
        pattern = "".join({"mamba": "M", "attention": "*"}.get(str(name), "-") for name in names)
    ssm = dtype_name(str(config.data.get("mamba_ssm_cache_dtype", "float32")), field="mamba_ssm_cache_dtype")
    layers: list[LayerSpec] = []
    for i, kind in enumerate(pattern):
        name = f"{prefix}model.layers.{i}.mixer"
        if kind == "*":
            layers.append(config.attention(f"{name}.attn", i))
        elif kind == "M":
            layers.append(config.mamba2(name, i, ssm_dtype=ssm))
    return layers, len(pattern)


def _falcon_h1(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    """Attention and Mamba2 in every layer; vLLM numbers the mixers behind the last layer."""
    n = config.num_layers
    layers: list[LayerSpec] = []
    for i in range(n):
        layers.append(config.attention(f"{prefix}model.layers.{i}.attn", i))
        layers.append(config.mamba2(f"{prefix}model.{n + i}.mixer", i))
    return layers, n


def _qwen3_next(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    n = config.num_layers
    every = config.count("full_attention_interval", default=4)
    types = config.types("layer_types", num_layers=n) or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(n)
    ]
    layers: list[LayerSpec] = []
    for i, kind in enumerate(types):
        name = f"{prefix}model.layers.{i}"
        if kind == "full_attention":
            layers.append(config.attention(f"{name}.self_attn.attn", i, head_dim=256))
        else:
            layers.append(_delta_net(config, f"{name}.linear_attn", i))
    return layers, n


def _delta_net(config: Config, name: str, index: int) -> LayerSpec:
    return GdnSpec(
        name=name,
        num_k_heads=config.count("linear_num_key_heads", default=16),
        num_v_heads=config.count("linear_num_value_heads", default=32),
        head_k_dim=config.count("linear_key_head_dim", default=128),
        head_v_dim=config.count("linear_value_head_dim", default=128),
        conv_kernel=config.count("linear_conv_kernel_dim", default=4),
        dtype=config.dtype,
        ssm_dtype=config.dtype,
        index=index,
    )


def _mamba(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    n = config.num_layers
    inner = config.data.get("intermediate_size") or config.count("expand", default=2) * config.count("hidden_size")
    return [
        Mamba1Spec(
            name=f"{prefix}backbone.layers.{i}.mixer",
            intermediate_size=inner,
            state_size=config.count("state_size", default=16),
            conv_kernel=config.count("conv_kernel", default=4),
            dtype=config.dtype,
            ssm_dtype=config.dtype,
            index=i,
        )
        for i in range(n)
    ], n


def _mamba2(config: Config, prefix: str) -> tuple[list[LayerSpec], int]:
    n = config.num_layers
    return [config.mamba2(f"{prefix}backbone.layers.{i}.mixer", i) for i in range(n)], n


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _plain),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), _deepseek),
    "jamba": _jamba,
    "bamba": _bamba,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "qwen3_next": _qwen3_next,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
}
"""By ``model_type``."""
