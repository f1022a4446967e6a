"""Elections over real layouts are balanced: readers per source rank, for all TP pairs."""

from __future__ import annotations

import pytest

from kvplan.layouts import AddressSpace, AttentionSpec, CacheGeometry, EngineSpec, LatentSpec, Parallel, engine_layout
from kvplan.planner import elect

LATENT = LatentSpec(name="l.0", latent_dim=4)


def layout(layer, tp):
    cache = CacheGeometry(block_size=4, num_blocks=2)
    spec = EngineSpec(engine_id=f"tp{tp}", layers=(layer,), num_layers=1, parallel=Parallel(tp=tp), cache=cache)
    return engine_layout(spec, AddressSpace())


@pytest.mark.parametrize("source", range(1, 33))
def test_latent_rows_of_every_pair_up_to_32(source):
    for destination in range(1, 33):
        readers = elect(layout(LATENT, source), layout(LATENT, destination)).readers
        counts = [len(own) for own in readers]
        assert sum(counts) == destination
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_replicated_heads_of_every_dividing_pair_up_to_32(heads):
    sizes = [heads * repeat for repeat in (1, 2, 3, 4) if heads * repeat <= 32]
    layer = AttentionSpec(name="l.0", num_kv_heads=heads, head_dim=2)
    for source in sizes:
        for destination in sizes:
            readers = elect(layout(layer, source), layout(layer, destination)).readers
            counts = [len(own) for own in readers]
            assert max(counts) - min(counts) <= 1, (source, destination, counts)
