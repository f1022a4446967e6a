"""Border blocks of a load are clean where old bytes could be read as numbers."""

import pytest
import torch

from kvplan.planner import BlockTable
from kvplan.vllm.clearing import Clearer
from kvplan.vllm.groups import read_groups
from tests.vllm.standins import allocate, attention_spec, cache_config, mamba_spec

ATTENTION, STATE = "model.layers.1.attn", "model.layers.0.mixer"


def hybrid():
    attention = attention_spec(heads=2, dim=32, block=64)
    state = mamba_spec(
        ((3, 16), (4, 8, 8)), (torch.bfloat16, torch.float32), padded=attention.page_size_bytes, block=4096
    )
    return cache_config([([STATE], state), ([ATTENTION], attention)], 8)


def clearer(config, caches):
    return Clearer(config, caches, is_state=[group.is_state for group in read_groups(config)])


@pytest.mark.parametrize("kernel", [64, 32])
def test_first_and_last_attention_blocks_are_zeroed_and_nothing_else(kernel):
    config = hybrid()
    caches = allocate(config, kernel_block_sizes=[4096, 64])
    if kernel == 32:
        caches[ATTENTION] = caches[ATTENTION].view(16, 2, 32, 64)
    caches[ATTENTION].fill_(float("nan"))
    cleared = clearer(config, caches).clear([BlockTable(0, [5]), BlockTable(64, [3, -1, 6, 2])])
    ratio = 64 // kernel
    clean = {index // ratio for index, block in enumerate(caches[ATTENTION]) if not block.isnan().any()}
    assert (cleared, clean) == (2, {3, 2})


def test_models_of_one_format_are_left_alone():
    spec = attention_spec(heads=2, dim=32, block=64)
    config = cache_config([([ATTENTION], spec)], 8)
    caches = allocate(config)
    caches[ATTENTION].fill_(1.0)
    assert clearer(config, caches).clear([BlockTable(0, [1, 2])]) == 0
    assert bool((caches[ATTENTION] == 1).all())
