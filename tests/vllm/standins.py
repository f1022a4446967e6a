"""vLLM's own specs, cache configurations and allocator, with plain stand-ins for the configuration around them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache


@dataclass
class Module:
    """An attention layer as far as the description asks for it."""

    backend: Any = CPUAttentionBackend
    isa: str = "vec"
    kv_sharing_target_layer_name: str | None = None

    def get_attn_backend(self):
        return self.backend


@dataclass
class HfConfig:
    fields: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name):
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to_dict(self):
        return dict(self.fields)


@dataclass
class ModelConfig:
    num_kv_heads: int = 4
    num_layers: int = 4
    dtype: Any = torch.bfloat16
    model: str = "/models/tiny"
    hf_text_config: HfConfig = field(default_factory=HfConfig)

    def get_total_num_kv_heads(self):
        return self.num_kv_heads

    def get_total_num_hidden_layers(self):
        return self.num_layers


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    data_parallel_index: int = 0


@dataclass
class CacheConfig:
    cache_dtype: str = "auto"
    block_size: int = 32
    calculate_kv_scales: bool = False


@dataclass
class CompilationConfig:
    static_forward_context: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config:
    """As much of a ``VllmConfig`` as the description reads."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    speculative_config: Any = None


def layer_names(count):
    return [f"model.layers.{index}.self_attn.attn" for index in range(count)]


def attention_spec(*, heads, dim, block, dtype=torch.bfloat16, cls=FullAttentionSpec, **more):
    return cls(block_size=block, num_kv_heads=heads, head_size=dim, dtype=dtype, **more)


def latent_spec(*, dim, block, dtype=torch.bfloat16):
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=dim, dtype=dtype, max_tp_shards=1)


def mamba_spec(shapes, dtypes, *, block=4096, padded=None, **more):
    return MambaSpec(block_size=block, shapes=shapes, dtypes=dtypes, page_size_padded=padded, **more)


def cache_config(groups, num_blocks, *, layout="LBHNC"):
    """Return a ``KVCacheConfig`` as vLLM lays it out: the i-th layers of all groups share a range of bytes.

    ``groups`` is a list of (layer names, spec). Layer after layer, or with a block-outermost layout block after block.
    """
    pages = [spec.page_size_bytes for _, spec in groups]
    page, depth = max(pages), max(len(names) for names, _ in groups)
    row = page // groups[0][1].num_heads
    layer_stride, block_stride = {
        "LBHNC": (page * num_blocks, page),
        "LBNHC": (page * num_blocks, page),
        "LHBNC": (page * num_blocks, row),
        "BLHNC": (page, page * depth),
        "BLNHC": (page, page * depth),
        "BHLNC": (row, page * depth),
    }[layout]
    size = page * num_blocks * depth
    tensors = [
        KVCacheTensor(size=size, layers=list(names), layer_stride=layer_stride, block_stride=block_stride)
        for names, _ in groups
    ]
    specs = [KVCacheGroupSpec(layer_names=list(names), kv_cache_spec=spec) for names, spec in groups]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=specs, kv_cache_layout=layout)


def allocate(config, *, kernel_block_sizes=None):
    """Return the tensors that vLLM's own allocator makes."""
    layout = KVCacheLayout[config.kv_cache_layout]
    return allocate_kv_cache(config, torch.device("cpu"), layout, kernel_block_sizes)


def with_modules(config, names, module=None):
    for name in names:
        config.compilation_config.static_forward_context[name] = module or Module()
    return config


CPU_MLA = CPUMLABackend
