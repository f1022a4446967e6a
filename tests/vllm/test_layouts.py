"""Other layouts and groups, on tensors of vLLM's own allocator: compared by logical coordinate, not by bytes."""

import itertools

import pytest
import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvplan.errors import UnsupportedError
from kvplan.layouts.parallel import Place
from kvplan.planner import BlockTable
from kvplan.vllm.caches import storages
from kvplan.vllm.describe import describe
from tests.vllm.moving import move
from tests.vllm.standins import (
    CPU_MLA,
    Config,
    HfConfig,
    ModelConfig,
    Module,
    ParallelConfig,
    allocate,
    attention_spec,
    cache_config,
    latent_spec,
    layer_names,
    mamba_spec,
    with_modules,
)

HEADS, DIM, TOKENS = 4, 16, 150


class Plain:
    """A GPU backend as far as the description asks for it: K and V behind one another in each row."""

    @staticmethod
    def get_name():
        return "FLASH_ATTN"


class Engine:
    def __init__(self, *, tp, block, layout="LBHNC", kernel=None, layers=3):
        self.tp, self.block = tp, block
        self.ranks, self.caches = [], []
        names = layer_names(layers)
        for rank in range(tp):
            spec = attention_spec(heads=HEADS // tp, dim=DIM, block=block)
            config = cache_config([(names, spec)], 20, layout=layout)
            caches = allocate(config, kernel_block_sizes=[kernel or block])
            vllm = Config(parallel_config=ParallelConfig(tensor_parallel_size=tp))
            with_modules(vllm, names, Module(backend=Plain))
            self.ranks.append(describe(vllm, config, caches, Place(rank, 0, tp)).layout)
            self.caches.append(caches)

    def row(self, layer, head, token, ids):
        """Return the row of one head and token, wherever it lies."""
        here = HEADS // self.tp
        cache = self.caches[head // here][layer]
        kernel = cache.shape[2]
        block = ids[token // self.block] * (self.block // kernel) + token % self.block // kernel
        return cache[block, head % here, token % kernel]


LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"]


@pytest.mark.parametrize("source_layout,destination_layout", list(itertools.product(LAYOUTS, LAYOUTS)))
def test_any_layout_meets_any_layout(source_layout, destination_layout):
    source = Engine(tp=2, block=48, layout=source_layout)
    destination = Engine(tp=1, block=32, layout=destination_layout)
    ids = [7, 3, 12, 9], [4, 1, 8, 2, 16]
    generator = torch.Generator().manual_seed(5)
    for layer, head, token in itertools.product(layer_names(3), range(HEADS), range(TOKENS)):
        source.row(layer, head, token, ids[0]).copy_(torch.rand(2 * DIM, generator=generator))
    move(source.ranks, destination.ranks, [BlockTable(0, ids[0])], [BlockTable(0, ids[1])], num_tokens=TOKENS)
    for layer, head, token in itertools.product(layer_names(3), range(HEADS), range(TOKENS)):
        assert torch.equal(source.row(layer, head, token, ids[0]), destination.row(layer, head, token, ids[1])), (
            layer,
            head,
            token,
        )


def test_heads_outside_their_block_are_refused():
    with pytest.raises(UnsupportedError, match="heads lie outside its blocks"):
        Engine(tp=1, block=32, layout="LHBNC")


def test_layers_inside_one_block_share_one_region():
    layout = Engine(tp=1, block=32, layout="BLHNC").ranks[0]
    assert len(layout.regions) == 1
    assert {item.region for item in layout.components} == {0}


def test_kernel_blocks_of_a_plain_backend():
    source = Engine(tp=1, block=48, kernel=16)
    destination = Engine(tp=2, block=32, layout="LBNHC", kernel=16)
    ids = [7, 3, 12, 9], [4, 1, 8, 2, 16]
    for layer, head, token in itertools.product(layer_names(3), range(HEADS), range(TOKENS)):
        source.row(layer, head, token, ids[0]).fill_((head + 1) * 0.5 + token)
    move(source.ranks, destination.ranks, [BlockTable(0, ids[0])], [BlockTable(0, ids[1])], num_tokens=TOKENS)
    for layer, head, token in itertools.product(layer_names(3), range(HEADS), range(TOKENS)):
        assert destination.row(layer, head, token, ids[1])[0] == torch.tensor((head + 1) * 0.5 + token).bfloat16()


def window_spec(block):
    return attention_spec(heads=2, dim=32, block=block, cls=SlidingWindowSpec, sliding_window=64)


def groups_engine(block):
    """Return an engine as Gemma 3 has it: full attention and windows share bytes, block ids keep them apart."""
    names = layer_names(4)
    groups = [(names[:2], attention_spec(heads=2, dim=32, block=block)), (names[2:], window_spec(block))]
    config = cache_config(groups, 16)
    vllm = with_modules(Config(model_config=ModelConfig(num_kv_heads=2)), names)
    caches = allocate(config)
    return describe(vllm, config, caches, Place(0, 0, 1)), caches


def test_groups_that_share_bytes_do_not_touch_each_others_blocks():
    source, from_caches = groups_engine(32)
    destination, to_caches = groups_engine(32)
    assert len(source.layout.regions) == 2
    assert len(storages(source.caches)) == 1
    for number, block in enumerate([3, 4, 5, 6, 9, 10]):
        for name in (layer_names(4)[0], layer_names(4)[1]):
            from_caches[name][block] = number + 1.0
    move(
        [source.layout],
        [destination.layout],
        [BlockTable(0, [3, 4, 5, 6]), BlockTable(64, [9, 10])],
        [BlockTable(0, [11, 12, 13, 14]), BlockTable(64, [1, 2], needed_from=65)],
        num_tokens=128,
    )
    first = to_caches[layer_names(4)[0]]
    assert [float(block.float().mean()) for block in first] == [0, 5, 6, *[0] * 8, 1, 2, 3, 4, 0]


def test_latents_are_the_same_on_every_rank():
    def engine(tp):
        names = layer_names(2)
        config = cache_config([(names, latent_spec(dim=576, block=16))], 20)
        vllm = Config(parallel_config=ParallelConfig(tensor_parallel_size=tp))
        with_modules(vllm, names, Module(backend=CPU_MLA))
        caches = [allocate(config) for _ in range(tp)]
        return [describe(vllm, config, caches[rank], Place(rank, 0, tp)).layout for rank in range(tp)], caches

    (source, from_caches), (destination, to_caches) = engine(2), engine(3)
    generator = torch.Generator().manual_seed(2)
    for name in layer_names(2):
        values = torch.rand(20, 1, 16, 576, generator=generator)
        for caches in from_caches:
            caches[name].copy_(values)
    ids = [3, 9, 4], [7, 5, 6]
    move(source, destination, [BlockTable(0, ids[0])], [BlockTable(0, ids[1])], num_tokens=40)
    for name, caches in itertools.product(layer_names(2), to_caches):
        assert torch.equal(caches[name][ids[1]], from_caches[0][name][ids[0]])


def test_attention_and_state_in_one_allocation():
    attention = attention_spec(heads=4, dim=32, block=64)
    state = mamba_spec(
        ((3, 16 * 4 + 2 * 8), (16, 4, 8)), (torch.bfloat16, torch.float32), padded=attention.page_size_bytes
    )
    names = ["model.layers.0.mixer", "model.layers.1.self_attn.attn"]
    config = cache_config([([names[0]], state), ([names[1]], attention)], 12)
    vllm = Config(model_config=ModelConfig(hf_text_config=HfConfig({"mamba_n_groups": 1})))
    described = describe(with_modules(vllm, names), config, allocate(config), Place(0, 0, 1))
    layout = described.layout
    assert len(layout.regions) == 1
    assert {item.component: item.group for item in layout.components} == {
        "conv.x": 0, "conv.b": 0, "conv.c": 0, "ssm": 0, "k": 1, "v": 1,
    }  # fmt: skip


def test_rows_that_carry_scales_are_refused():
    from vllm.v1.kv_cache_interface import KVQuantMode

    spec = attention_spec(heads=4, dim=32, block=32, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    config = cache_config([(layer_names(1), spec)], 4)
    vllm = with_modules(Config(), layer_names(1), Module(backend=Plain))
    with pytest.raises(UnsupportedError, match="INT8_PER_TOKEN_HEAD is not known"):
        describe(vllm, config, allocate(config), Place(0, 0, 1))
