"""State pages of every mixer that vLLM has, split over ranks by hand, moved, and compared byte for byte."""

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Mixer

from kvplan.errors import UnsupportedError
from kvplan.layouts.parallel import Place
from kvplan.planner import BlockTable
from kvplan.vllm.describe import describe
from tests.vllm.moving import move
from tests.vllm.standins import (
    Config,
    HfConfig,
    ModelConfig,
    ParallelConfig,
    allocate,
    cache_config,
    mamba_spec,
    with_modules,
)

NAMES = ["model.layers.0.mixer", "model.layers.2.mixer"]
WIDTH = 3


def part(full, rank, tp):
    """Return a rank's share of the first axis: equal shares, or one of them repeated."""
    count = full.shape[0]
    return full[rank * count // tp : -(-(rank + 1) * count // tp)]


class Mamba2:
    """x, B and C in the convolution state; ``groups`` of B and C may be fewer than ranks."""

    mixer, config = Mixer.MAMBA2, {"mamba_n_groups": 0}
    ssm_dtype = torch.float32

    def __init__(self, groups=1, heads=16, dim=4, state=8):
        self.groups, self.heads, self.dim, self.state = groups, heads, dim, state
        self.config = {"mamba_n_groups": groups}

    def full(self, generator):
        x = torch.rand(self.heads, self.dim * WIDTH, generator=generator)
        b, c = (torch.rand(self.groups, self.state * WIDTH, generator=generator) for _ in range(2))
        return [x, b, c], torch.rand(self.heads, self.dim, self.state, generator=generator)


class Mamba1:
    mixer, config = Mixer.MAMBA1, {}
    ssm_dtype = torch.bfloat16

    def full(self, generator):
        return [torch.rand(24, WIDTH, generator=generator)], torch.rand(24, 16, generator=generator)


class DeltaNet:
    mixer, config = Mixer.GDN_ATTN, {"linear_num_key_heads": 4}
    ssm_dtype = torch.bfloat16

    def full(self, generator):
        q, k = (torch.rand(4, 8 * WIDTH, generator=generator) for _ in range(2))
        v = torch.rand(8, 4 * WIDTH, generator=generator)
        return [q, k, v], torch.rand(8, 4, 8, generator=generator)


def rank_state(model, seed, rank, tp, *, dim_first):
    """Return (convolution, recurrent) of one rank, cut by hand from the whole model's."""
    projections, recurrent = model.full(torch.Generator().manual_seed(seed))
    channels = torch.cat([part(item, rank, tp).reshape(-1, WIDTH) for item in projections]).to(torch.bfloat16)
    conv = channels if dim_first else channels.t()
    return conv.contiguous(), part(recurrent, rank, tp).to(model.ssm_dtype).contiguous()


class Engine:
    def __init__(self, model, tp, *, dim_first, monkeypatch, padded=0, num_blocks=6):
        from vllm.model_executor.layers.mamba import mamba_utils

        monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: dim_first)
        self.model, self.tp, self.dim_first = model, tp, dim_first
        self.ranks, self.caches = [], []
        for rank in range(tp):
            conv, ssm = rank_state(model, 0, rank, tp, dim_first=dim_first)
            size = conv.nbytes + ssm.nbytes
            spec = mamba_spec(
                (tuple(conv.shape), tuple(ssm.shape)),
                (conv.dtype, ssm.dtype),
                padded=size + padded if padded else None,
                mamba_type=model.mixer,
            )
            config = cache_config([(NAMES, spec)], num_blocks)
            vllm = Config(
                model_config=ModelConfig(hf_text_config=HfConfig(model.config)),
                parallel_config=ParallelConfig(tensor_parallel_size=tp),
            )
            self.caches.append(allocate(config))
            self.ranks.append(describe(with_modules(vllm, NAMES), config, self.caches[-1], Place(rank, 0, tp)).layout)

    def write(self, seed, block):
        for rank in range(self.tp):
            for offset, name in enumerate(NAMES):
                states = rank_state(self.model, seed + offset, rank, self.tp, dim_first=self.dim_first)
                raw = torch.cat([state.view(-1).view(torch.int8) for state in states])
                self.caches[rank][name][block, 0, 0, : len(raw)] = raw


MODELS = {
    "mamba2, one group": Mamba2(1),
    "mamba2, two groups": Mamba2(2),
    "mamba2, eight groups": Mamba2(8),
    "mamba1": Mamba1(),
    "gated delta net": DeltaNet(),
}


@pytest.mark.parametrize("orders", [(False, False), (True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("tps", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_state_arrives_in_the_readers_shards_and_order(model, tps, orders, monkeypatch):
    if isinstance(model, Mamba2) and model.groups == 2 and 4 in tps:
        pytest.skip("vLLM repeats one group only")
    source = Engine(model, tps[0], dim_first=orders[0], monkeypatch=monkeypatch, padded=512)
    destination = Engine(model, tps[1], dim_first=orders[1], monkeypatch=monkeypatch, num_blocks=4)
    expected = Engine(model, tps[1], dim_first=orders[1], monkeypatch=monkeypatch, num_blocks=4)
    source.write(seed=11, block=5)
    expected.write(seed=11, block=2)
    moved = move(source.ranks, destination.ranks, [BlockTable(0, [5])], [BlockTable(0, [2])], num_tokens=99)
    assert moved > 0
    for ours, theirs in zip(destination.caches, expected.caches, strict=True):
        for name in NAMES:
            assert torch.equal(ours[name], theirs[name]), name


def test_groups_that_the_configuration_does_not_give_are_refused_under_tp(monkeypatch):
    model = Mamba2(1)
    model.config = {}
    with pytest.raises(UnsupportedError, match="does not say how many Mamba2 groups"):
        Engine(model, 2, dim_first=False, monkeypatch=monkeypatch)


def test_a_mixer_that_is_not_known_is_refused(monkeypatch):
    model = Mamba1()
    model.mixer = Mixer.LINEAR
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mixer.*LINEAR is not known; known: MAMBA1, MAMBA2"):
        Engine(model, 1, dim_first=False, monkeypatch=monkeypatch)
