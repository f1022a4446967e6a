"""Attention caches: from a layer's tensor and backend to the declarations of K and V, or of the latent. No state.

A tensor is ``[kernel blocks, heads, tokens, content]``; the backend says what the content is:

- plain backends: a row holds K's elements, then V's (``[..., :head_size]`` and ``[..., head_size:]``);
- vLLM's CPU attention: a block of one head is ``2 * tokens * head_dim`` elements, packed as its kernel packs them;
  ``packing`` measures that;
- MLA: one row is one latent.

Strides of blocks, heads and tokens come from the tensor, never from a layout's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplan.layouts.formats import dtype_name, format_tag
from kvplan.layouts.parallel import held
from kvplan.planner import Axis, BlockLayout, Span
from kvplan.vllm.packing import Operand, Packing, measure, spans

if TYPE_CHECKING:
    from kvplan.layouts.page import BlockShape
    from kvplan.layouts.parallel import Place
    from kvplan.vllm.caches import LayerCache

PLAIN_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN")
"""Backends that split the content axis at ``head_size`` (vLLM 0.32, ``v1/attention/backends``)."""

CPU_BACKENDS = ("CPU_ATTN",)

LATENT_BACKENDS = (
    "AMX_MLA",
    "CPU_MLA",
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA",
    "TRITON_MLA",
)
"""Backends that store one latent row a token, K's compressed part first."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What is known of one attention layer beside its tensor."""

    num_kv_heads: int
    """KV heads of the whole model."""
    head_dim: int
    head_dim_v: int
    cache_dtype: str
    """Element type of the cache by name, as ``bfloat16`` or ``float8_e4m3fn``; torch's own type may be ``uint8``."""
    isa: str = ""
    """Instruction set that the CPU attention packs for."""
    model_dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    """vLLM's name of the cache's type, which its CPU kernel is told."""


def attention_blocks(cache: LayerCache, layer: Attention, place: Place, shape: BlockShape) -> dict[str, BlockLayout]:
    """Return the block layouts of ``k`` and ``v``, offsets relative to the layer's own start in a block."""
    heads = held(place.head_rank, place.head_parts, layer.num_kv_heads)
    if cache.shape[1] != heads[1] - heads[0]:
        raise cache.refuse(
            f"{cache.shape[1]} KV heads are here, but rank {place.tp_rank} of {place.tp} holds heads "
            f"[{heads[0]}, {heads[1]}) of {layer.num_kv_heads}"
        )
    _check_tokens(cache, shape)
    if (cache.shape[1] - 1) * cache.stride_bytes[1] >= cache.block_stride_bytes:
        raise cache.refuse("its heads lie outside its blocks; layouts with the block outside the heads work (HND, NHD)")
    if cache.backend in CPU_BACKENDS:
        packing = _cpu_packing(cache, layer)
    elif cache.backend in PLAIN_BACKENDS:
        packing = _plain_packing(cache, layer)
    else:
        raise cache.refuse(f"its backend is not known; known: {', '.join((*CPU_BACKENDS, *PLAIN_BACKENDS))}")
    dtype = dtype_name(layer.cache_dtype)
    head = Axis("kv_head", (Span(*heads, 0, cache.stride_bytes[1]),))
    return {
        "k": _operand_block(cache, packing.key, dtype, head, shape),
        "v": _operand_block(cache, packing.value, dtype, head, shape),
    }


def latent_blocks(cache: LayerCache, cache_dtype: str, shape: BlockShape, component: str) -> dict[str, BlockLayout]:
    """Return the block layout of an MLA layer: one row a token, the same on every TP rank."""
    if cache.backend not in LATENT_BACKENDS:
        raise cache.refuse(f"its backend is not known; known: {', '.join(LATENT_BACKENDS)}")
    if cache.shape[1] != 1 or cache.stride_bytes[3] != cache.item_bytes:
        raise cache.refuse("a latent cache has one head and dense rows")
    _check_tokens(cache, shape)
    row = cache.shape[3] * cache.item_bytes
    axis = shape.token_axis(cache.stride_bytes[2], cache.stride_bytes[0])
    tag = format_tag(dtype_name(cache_dtype), cache.shape[3])
    return {component: BlockLayout((axis,), row, tag, 0, shape.tokens_per_block)}


def _check_tokens(cache: LayerCache, shape: BlockShape) -> None:
    if cache.shape[2] != shape.kernel_tokens or cache.num_kernel_blocks * shape.kernel_tokens != shape.block_size:
        raise cache.refuse(f"{cache.shape[2]} tokens a kernel block do not make the block of {shape.block_size} tokens")


def _operand_block(cache: LayerCache, operand: Operand, dtype: str, head: Axis, shape: BlockShape) -> BlockLayout:
    """Return the layout of K or V; a row of neighbouring elements is one atom, else ``head_dim`` is an axis."""
    item = cache.item_bytes
    axes, count = [head, _token_axis(cache, operand, shape)], len(operand.dim)
    if operand.dim != tuple(range(count)):
        axes.append(Axis("head_dim", spans(operand.dim, start=0, offset_bytes=0, item_bytes=item)))
        count = 1
    base = operand.base * item
    return BlockLayout(tuple(axes), count * item, format_tag(dtype, count), base, shape.tokens_per_block)


def _token_axis(cache: LayerCache, operand: Operand, shape: BlockShape) -> Axis:
    """Return the token axis: the rows of a kernel block, repeated over kernel blocks, at global coordinates."""
    out: list[Span] = []
    kernel_stride = cache.stride_bytes[0]
    for local, first, count in shape.pieces():
        block, row = divmod(local, shape.kernel_tokens)
        rows = operand.token[row : row + count]
        out += spans(rows, start=first, offset_bytes=block * kernel_stride, item_bytes=cache.item_bytes)
    return Axis("token", tuple(out))


def _plain_packing(cache: LayerCache, layer: Attention) -> Packing:
    """Return the packing of a plain backend: K's elements, then V's, in each row."""
    if cache.stride_bytes[3] != cache.item_bytes or cache.shape[3] != layer.head_dim + layer.head_dim_v:
        raise cache.refuse(f"a row is not {layer.head_dim} elements of K and {layer.head_dim_v} of V")
    step = cache.stride_bytes[2] // cache.item_bytes
    token = tuple(row * step for row in range(cache.shape[2]))
    key = Operand(0, token, tuple(range(layer.head_dim)))
    return Packing(key, Operand(layer.head_dim, token, tuple(range(layer.head_dim_v))))


def _cpu_packing(cache: LayerCache, layer: Attention) -> Packing:
    """Return what the CPU attention's own kernel does with a block of one head."""
    tokens, dim = cache.shape[2], layer.head_dim
    dense = (2 * dim * cache.item_bytes, cache.item_bytes)
    if layer.head_dim_v != dim or cache.shape[3] != 2 * dim or cache.stride_bytes[2:] != dense:
        raise cache.refuse(f"a block of one head is not 2 * {tokens} * {dim} elements in a row")
    write = _kernel_writer(tokens, dim, layer, cache)
    return measure(write, num_tokens=tokens, head_dim=dim)


def _kernel_writer(tokens: int, dim: int, layer: Attention, cache: LayerCache) -> Any:
    """Return ``write`` for ``packing.measure``: vLLM's kernel on a scratch block of one head."""
    import torch

    from vllm import _custom_ops as ops

    model_dtype = getattr(torch, layer.model_dtype)
    scratch = torch.zeros((1, 1, tokens, 2 * dim), dtype=getattr(torch, cache.dtype))
    codes = scratch.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.item_bytes])
    key_cache, value_cache = scratch.view(1, 1, 2 * tokens, dim).chunk(2, dim=2)
    slots = torch.arange(tokens)

    def write(operand: str, digits: Any) -> Any:
        given = torch.from_numpy(digits).to(model_dtype).unsqueeze(1).contiguous()
        zeros = torch.zeros_like(given)
        key, value = (given, zeros) if operand == "key" else (zeros, given)
        scratch.zero_()
        ops.cpu_attn_reshape_and_cache(
            key, value, key_cache, value_cache, slots, layer.isa,
            k_scale=1.0, v_scale=1.0, kv_cache_dtype=layer.kv_cache_dtype,
        )  # fmt: skip
        return codes.to(torch.int64).numpy()

    return write
