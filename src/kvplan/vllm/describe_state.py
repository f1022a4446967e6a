"""State caches (Mamba1, Mamba2, gated delta net, short convolution): from a page's shapes to declarations. No tokens.

A layer's page is int8 bytes: the convolution state, then the recurrent state, shapes and element types from vLLM's
``MambaSpec``; padding behind them. What lies in the page is declared by ``layouts``; here the sizes of the whole model
are worked out from the rank's shapes, and what comes out is compared with those shapes, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from kvplan.layouts import CacheGeometry, GdnSpec, Mamba1Spec, Mamba2Spec, Place
from kvplan.layouts.formats import ITEM_BYTES, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.layouts.page import Page
    from kvplan.planner import BlockLayout
    from kvplan.vllm.caches import LayerCache


@dataclass(frozen=True, slots=True)
class State:
    """What is known of one state layer beside its tensor."""

    kind: str
    """vLLM's name of the mixer: ``MAMBA1``, ``MAMBA2``, ``GDN_ATTN``."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    dim_first: bool
    """True when the convolution state is ``[channels, width]`` (DS)."""
    num_groups: int | None = None
    """Mamba2's groups of the whole model; None when the configuration does not say."""
    num_key_heads: int | None = None
    """Gated delta net's key heads of the whole model."""
    tp_replicated: bool = False
    """True when every TP rank holds the full state."""

    @property
    def width(self) -> int:
        """Inputs that the convolution remembers."""
        return self.shapes[0][1] if self.dim_first else self.shapes[0][0]

    @property
    def channels(self) -> int:
        """Channels of the convolution state on this rank."""
        return self.shapes[0][0] if self.dim_first else self.shapes[0][1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the page that mean something."""
        return sum(
            prod(shape) * ITEM_BYTES[dtype_name(dtype)] for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


def state_blocks(cache: LayerCache, state: State, place: Place) -> dict[str, BlockLayout]:
    """Return the block layouts of a state layer, offsets relative to the layer's own start in a block."""
    from kvplan.planner import BlockLayout

    page_bytes = cache.shape[3] * cache.item_bytes
    if cache.num_kernel_blocks != 1 or cache.shape[1:3] != (1, 1) or cache.stride_bytes[3] != cache.item_bytes:
        raise cache.refuse("a state cache is one dense page per block")
    if state.num_bytes > page_bytes:
        raise cache.refuse(f"its states take {state.num_bytes} bytes, a page has {page_bytes}")
    if state.tp_replicated:
        place = Place(0, place.pp_rank, 1)
    page = _page(cache, state, place)
    if page.num_bytes != state.num_bytes:
        raise cache.refuse(f"its states take {state.num_bytes} bytes, the declaration {page.num_bytes}")
    return {
        part.component: BlockLayout(part.axes, part.atom_bytes, part.format, part.offset_bytes) for part in page.parts
    }


def _page(cache: LayerCache, state: State, place: Place) -> Page:
    """Return the page that ``layouts`` declares for this kind on this rank."""
    if state.kind not in _SPECS:
        raise cache.refuse(f"state of kind {state.kind} is not known; known: {', '.join(_SPECS)}")
    if len(state.shapes) != 2 or len(state.dtypes) != 2 or len(state.shapes[0]) != 2:
        raise cache.refuse(f"state of kind {state.kind} has shapes {state.shapes}; two states, convolution first, work")
    geometry = CacheGeometry(conv_layout="DS" if state.dim_first else "SD")
    (page,) = _SPECS[state.kind](cache, state, place).pages(place, geometry)
    return page


def _common(cache: LayerCache, state: State) -> dict[str, Any]:
    conv, ssm = (dtype_name(dtype) for dtype in state.dtypes)
    return {"name": cache.layer, "conv_kernel": state.width + 1, "dtype": conv, "ssm_dtype": ssm}


def _mamba1(cache: LayerCache, state: State, place: Place) -> Mamba1Spec:
    inner, size = state.shapes[1]
    if inner != state.channels:
        raise cache.refuse(f"{state.channels} convolution channels, {inner} recurrent ones; Mamba1 has as many")
    return Mamba1Spec(**_common(cache, state), intermediate_size=inner * place.tp, state_size=size)


def _mamba2(cache: LayerCache, state: State, place: Place) -> Mamba2Spec:
    heads, dim, size = state.shapes[1]
    rest, odd = divmod(state.channels - heads * dim, 2 * size)
    if rest < 1 or odd:
        raise cache.refuse(f"{state.channels} channels are not x of {heads} * {dim} and whole groups of B and C")
    groups = _mamba2_groups(cache, state, place, rest)
    return Mamba2Spec(
        **_common(cache, state), num_heads=heads * place.tp, head_dim=dim, state_size=size, num_groups=groups
    )


def _mamba2_groups(cache: LayerCache, state: State, place: Place, local: int) -> int:
    """Return the groups of the whole model: ``local`` on each of the ranks, or fewer that are repeated."""
    if place.tp == 1 or state.num_groups == local * place.tp:
        return local * place.tp
    if state.num_groups is None:
        raise cache.refuse("the model's configuration does not say how many Mamba2 groups it has")
    if local == 1 and state.num_groups < place.tp:
        return state.num_groups
    raise cache.refuse(f"{local} groups on each of {place.tp} ranks do not make the model's {state.num_groups}")


def _gdn(cache: LayerCache, state: State, place: Place) -> GdnSpec:
    v_heads, v_dim, k_dim = state.shapes[1]
    rest, odd = divmod(state.channels - v_heads * v_dim, 2 * k_dim)
    if rest < 1 or odd:
        raise cache.refuse(f"{state.channels} channels are not v of {v_heads} * {v_dim} and whole heads of q and k")
    if state.num_key_heads is not None and rest * place.tp != state.num_key_heads:
        raise cache.refuse(f"{rest} key heads on each of {place.tp} ranks do not make {state.num_key_heads}")
    return GdnSpec(
        **_common(cache, state),
        num_k_heads=rest * place.tp,
        num_v_heads=v_heads * place.tp,
        head_k_dim=k_dim,
        head_v_dim=v_dim,
    )


_SPECS: dict[str, Callable[[LayerCache, State, Place], Mamba1Spec | Mamba2Spec | GdnSpec]] = {
    "MAMBA1": _mamba1,
    "MAMBA2": _mamba2,
    "GDN_ATTN": _gdn,
}
"""How each of vLLM's mixers is declared."""
