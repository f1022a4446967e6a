"""Engines of every kind of layer, small, at real memory; requests for them. No sessions."""

from __future__ import annotations

from kvplan.layouts import AttentionSpec, CacheGeometry, EngineSpec, LatentSpec, Mamba2Spec, Parallel, engine_layout
from kvplan.planner import BlockTable
from tests.session.engines import in_memory

NUM_BLOCKS = 9
LAYERS = (
    AttentionSpec(name="model.layers.0.attn", group=0, num_kv_heads=12, head_dim=4),
    Mamba2Spec(name="model.layers.1.mixer", group=1, num_heads=12, head_dim=2, state_size=3, num_groups=12),
    AttentionSpec(name="model.layers.2.attn", group=0, num_kv_heads=12, head_dim=4),
    LatentSpec(name="model.layers.3.mla", group=2, latent_dim=6),
)
"""Twelve heads: whole on 1, 2, 3 and 4 ranks."""
PARALLEL = ("tp", "pp", "dcp", "dcp_interleave")


def declared(name, **knobs):
    """Return an engine's layout at made-up addresses, and the tokens of a block."""
    parallel = Parallel(**{key: knobs.pop(key) for key in PARALLEL if key in knobs})
    cache = CacheGeometry(num_blocks=NUM_BLOCKS, **knobs)
    spec = EngineSpec(engine_id=name, layers=LAYERS, num_layers=len(LAYERS), parallel=parallel, cache=cache)
    return engine_layout(spec), cache.block_size * parallel.dcp


def hybrid(name, **knobs):
    """Return an engine's layout at real memory, that memory, and the tokens of a block."""
    layout, block_tokens = declared(name, **knobs)
    return *in_memory(layout), block_tokens


def tables(num_tokens, block_size, *, first_block=0, first_token=0, state=5):
    """Return block tables by group: attention, state, latent."""
    count = -(-num_tokens // block_size) - first_token // block_size
    blocks = BlockTable(first_token, tuple((first_block + 5 * i) % NUM_BLOCKS for i in range(count)))
    return (blocks, BlockTable(0, (state,)), blocks)
