"""Caches written by vLLM's own CPU kernel in one geometry, moved, and compared with what it writes in the other."""

import pytest
import torch

from kvplan.errors import UnsupportedError
from kvplan.layouts.parallel import Place
from kvplan.planner import BlockTable
from kvplan.vllm.describe import describe
from tests.vllm.moving import move
from tests.vllm.standins import (
    CacheConfig,
    Config,
    ModelConfig,
    Module,
    ParallelConfig,
    allocate,
    attention_spec,
    cache_config,
    layer_names,
    with_modules,
)
from vllm import _custom_ops as ops

LAYERS = 2
NUM_BLOCKS = 24


class Engine:
    """One engine's caches in this process, filled by the kernel."""

    def __init__(self, *, heads, dim, tp, block, kernel=None, dtype=torch.bfloat16, isa="vec", kv="auto"):
        self.heads, self.dim, self.tp, self.block, self.isa, self.kv = heads, dim, tp, block, isa, kv
        self.kernel, self.dtype = kernel or block, dtype
        self.ranks, self.caches = [], []
        for rank in range(tp):
            here = max(1, heads // tp)
            stored = torch.uint8 if kv.startswith("fp8") else dtype
            more = {"kv_quant_mode": _quant_mode(kv)}
            spec = attention_spec(heads=here, dim=dim, block=block, dtype=stored, **more)
            config = cache_config([(layer_names(LAYERS), spec)], NUM_BLOCKS)
            caches = allocate(config, kernel_block_sizes=[self.kernel])
            vllm = Config(
                model_config=ModelConfig(num_kv_heads=heads, dtype=dtype),
                parallel_config=ParallelConfig(tensor_parallel_size=tp),
                cache_config=CacheConfig(cache_dtype=kv, block_size=block),
            )
            with_modules(vllm, layer_names(LAYERS), Module(isa=isa))
            self.ranks.append(describe(vllm, config, caches, Place(rank, 0, tp)).layout)
            self.caches.append(caches)

    def write(self, layer, key, value, block_ids):
        """Store K and V of tokens from 0, shape [tokens, heads, dim], as the engine's own forward pass would."""
        tokens = torch.arange(key.shape[0])
        slots = torch.tensor(block_ids)[tokens // self.block] * self.block + tokens % self.block
        for rank in range(self.tp):
            first = rank * self.heads // self.tp
            here = max(1, self.heads // self.tp)
            cache = self.caches[rank][layer]
            view = cache.view(cache.shape[0], here, 2 * self.kernel, self.dim)
            k_cache, v_cache = view.chunk(2, dim=2)
            k, v = (part[:, first : first + here].contiguous() for part in (key, value))
            ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, self.isa, kv_cache_dtype=self.kv)

    def raw(self):
        return [
            {name: tensor.clone().view(-1).view(torch.uint8) for name, tensor in caches.items()}
            for caches in self.caches
        ]


def _quant_mode(kv):
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    return get_kv_quant_mode(kv)


def fill(engine, tokens, block_ids, seed):
    generator = torch.Generator().manual_seed(seed)
    for layer in layer_names(LAYERS):
        key, value = (
            torch.rand(tokens, engine.heads, engine.dim, generator=generator).to(engine.dtype) + 1 for _ in range(2)
        )
        engine.write(layer, key, value, block_ids)


def blocks_of(engine, tokens):
    """Return block ids that are neither neighbours nor in order, and never the null block."""
    return [(5 * index) % (NUM_BLOCKS - 1) + 1 for index in range(-(-tokens // engine.block))]


PAIRS = {
    "equal": ({"tp": 1, "block": 32}, {"tp": 1, "block": 32}),
    "smaller to larger blocks": ({"tp": 1, "block": 32}, {"tp": 1, "block": 64}),
    "larger to smaller blocks": ({"tp": 1, "block": 64}, {"tp": 1, "block": 32}),
    "96 to 64": ({"tp": 1, "block": 96}, {"tp": 1, "block": 64}),
    "1 to 2 ranks, 32 to 64": ({"tp": 1, "block": 32}, {"tp": 2, "block": 64}),
    "2 to 1 ranks, 64 to 32": ({"tp": 2, "block": 64}, {"tp": 1, "block": 32}),
    "kernel blocks 32 in 96 to 64": ({"tp": 1, "block": 96, "kernel": 32}, {"tp": 2, "block": 64}),
    "vec to amx packing": ({"tp": 1, "block": 32}, {"tp": 2, "block": 64, "isa": "amx"}),
    "amx to vec16 packing": ({"tp": 4, "block": 96, "isa": "amx"}, {"tp": 1, "block": 32, "isa": "vec16"}),
    "float32": ({"tp": 2, "block": 32, "dtype": torch.float32}, {"tp": 1, "block": 96, "dtype": torch.float32}),
    "fp8": ({"tp": 1, "block": 32, "kv": "fp8_e4m3"}, {"tp": 2, "block": 64, "kv": "fp8_e4m3"}),
}


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("tokens", [1, 31, 64, 100, 191])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_moved_cache_is_what_the_kernel_would_have_written(pair, tokens, heads):
    source = Engine(heads=heads, dim=32, **pair[0])
    expected = Engine(heads=heads, dim=32, **pair[1])
    destination = Engine(heads=heads, dim=32, **pair[1])
    source_ids, destination_ids = blocks_of(source, tokens), blocks_of(destination, tokens)[::-1]
    fill(source, tokens, source_ids, seed=7)
    fill(expected, tokens, destination_ids, seed=7)
    moved = move(
        source.ranks,
        destination.ranks,
        [BlockTable(0, source_ids)],
        [BlockTable(0, destination_ids)],
        num_tokens=tokens,
    )
    assert moved > 0
    for ours, theirs in zip(destination.raw(), expected.raw(), strict=True):
        for layer in layer_names(LAYERS):
            assert torch.equal(ours[layer], theirs[layer]), layer


@pytest.mark.parametrize("source_tp,destination_tp", [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_one_kv_head_is_repeated_on_every_rank(source_tp, destination_tp):
    source = Engine(heads=1, dim=64, tp=source_tp, block=32)
    expected = Engine(heads=1, dim=64, tp=destination_tp, block=64)
    destination = Engine(heads=1, dim=64, tp=destination_tp, block=64)
    ids = [3, 9, 4, 1], [2, 7]
    fill(source, 100, ids[0], seed=1)
    fill(expected, 100, ids[1], seed=1)
    move(source.ranks, destination.ranks, [BlockTable(0, ids[0])], [BlockTable(0, ids[1])], num_tokens=100)
    assert all(
        torch.equal(ours[layer], theirs[layer])
        for ours, theirs in zip(destination.raw(), expected.raw(), strict=True)
        for layer in ours
    )


def test_only_tokens_that_the_reader_lacks_are_written():
    source = Engine(heads=4, dim=32, tp=1, block=32)
    destination = Engine(heads=4, dim=32, tp=1, block=64)
    before = Engine(heads=4, dim=32, tp=1, block=64)
    fill(source, 160, [1, 2, 3, 4, 5], seed=3)
    fill(destination, 64, [9], seed=4)
    fill(before, 64, [9], seed=4)
    move(source.ranks, destination.ranks, [BlockTable(0, [1, 2, 3, 4, 5])], [BlockTable(64, [8, 6])], num_tokens=160)
    ours, theirs = destination.caches[0], before.caches[0]
    for layer in layer_names(LAYERS):
        untouched = [block for block in range(NUM_BLOCKS) if block not in {8, 6}]
        assert torch.equal(ours[layer][untouched], theirs[layer][untouched])
        assert ours[layer][[8, 6]].abs().sum() > 0


def described(**change):
    spec = attention_spec(heads=4, dim=32, block=32, **change.pop("spec", {}))
    config = cache_config([(layer_names(1), spec)], 4)
    vllm = with_modules(Config(), layer_names(1), change.pop("module", None))
    for name, value in change.items():
        setattr(vllm, name, value)
    return vllm, config, allocate(config)


def test_an_unknown_backend_is_refused_by_layer_shape_strides_and_backend():
    class Strange:
        @staticmethod
        def get_name():
            return "STRANGE"

    vllm, config, caches = described(module=Module(backend=Strange))
    with pytest.raises(UnsupportedError, match=r"layers\.0.*not known.*CPU_ATTN.*shape \[4, 4, 32, 64\].*STRANGE"):
        describe(vllm, config, caches, Place(0, 0, 1))


def test_a_head_count_that_is_not_the_models_is_refused():
    vllm, config, caches = described(
        model_config=ModelConfig(num_kv_heads=16), parallel_config=ParallelConfig(tensor_parallel_size=2)
    )
    with pytest.raises(UnsupportedError, match=r"4 KV heads are here.*heads \[8, 16\) of 16"):
        describe(vllm, config, caches, Place(1, 0, 2))


def test_a_tensor_that_is_not_paged_by_blocks_is_refused():
    vllm, config, caches = described()
    caches[layer_names(1)[0]] = caches[layer_names(1)[0]].flatten(2)
    with pytest.raises(UnsupportedError, match=r"not \[kernel blocks, heads, rows, content\]"):
        describe(vllm, config, caches, Place(0, 0, 1))


def test_a_layer_that_shares_anothers_cache_declares_nothing():
    spec = attention_spec(heads=4, dim=32, block=32)
    config = cache_config([(layer_names(2), spec)], 4)
    vllm = with_modules(Config(), layer_names(2))
    shared, owner = layer_names(2)[1], layer_names(2)[0]
    vllm.compilation_config.static_forward_context[shared] = Module(kv_sharing_target_layer_name=owner)
    layout = describe(vllm, config, allocate(config), Place(0, 0, 1)).layout
    assert {item.layer for item in layout.components} == {owner}
