"""Two connectors, scheduler and worker halves each, hook by hook as vLLM calls them; no engine between."""

import json
import time
import warnings

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvplan.errors import DescriptionError, UnsupportedError
from kvplan.layouts.parallel import Place
from kvplan.vllm import connector, worker
from kvplan.vllm.connector import KVPlanConnector, guarded
from kvplan.vllm.plugin import register
from tests.vllm.requests import TO_PREFILL, request
from tests.vllm.standins import Module, allocate, attention_spec, cache_config, layer_names
from vllm import _custom_ops as ops

LAYERS, HEADS, DIM = 2, 4, 32

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(worker, "rank_place", lambda config: Place(0, 0, 1))
    monkeypatch.setattr(connector, "share_logging", lambda: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def make_engine(tmp_path, free_port):
    made = []

    def make(**options):
        made.append(Engine(tmp_path / f"engine{len(made)}", free_port(), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def free_port():
    import socket

    def find():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


def engine_config(folder, block, extra, policy="fail", **model):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | model))
    transfer = KVTransferConfig(
        kv_connector="KVPlanConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=extra,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            block_size=block,
            max_model_len=1024,
            enforce_eager=True,
            kv_transfer_config=transfer,
        )
        return args.create_engine_config()


class Engine:
    """A scheduler connector and a worker connector of one engine, with real caches."""

    def __init__(self, folder, port, *, block=32, policy="fail", extra=None, **model):
        extra = {"transport": "memory", "side_channel_port": port, "handshake_timeout_s": 3.0} | (extra or {})
        self.config = engine_config(folder, block, extra, policy, **model)
        spec = attention_spec(heads=HEADS, dim=DIM, block=block)
        self.block, self.cache_config = block, cache_config([(layer_names(LAYERS), spec)], 32)
        self.caches = allocate(self.cache_config)
        for name in layer_names(LAYERS):
            self.config.compilation_config.static_forward_context[name] = Module()
        register()
        self.sent, self.received, self.failed = set(), set(), set()
        made = KVConnectorFactory.get_connector_class(self.config.kv_transfer_config)
        self.worker = made(self.config, KVConnectorRole.WORKER, self.cache_config)
        self.worker.register_kv_caches(self.caches)
        self.scheduler = made(self.config, KVConnectorRole.SCHEDULER, self.cache_config)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})

    def step(self):
        """Run one engine step without a forward pass, and keep what the worker reports."""
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        self.worker.start_load_kv(None)
        results = self.worker.get_transfer_results(set())
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(
            KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
            )
        )
        self.sent |= results.finished_sending
        self.received |= results.finished_recving
        self.failed |= results.failed_recving

    def prefill(self, request_id, tokens, block_ids):
        item = request(request_id, tokens, TO_PREFILL)
        self.scheduler.on_new_request(item)
        assert self.scheduler.get_num_new_matched_tokens(item, 0) == (0, False)
        item.num_computed_tokens, item.status = tokens, RequestStatus.FINISHED_LENGTH_CAPPED
        keep, params = self.scheduler.request_finished_all_groups(item, (block_ids,))
        assert keep
        return json.loads(json.dumps(params))

    def load(self, request_id, tokens, params, block_ids):
        item = request(request_id, tokens, params)
        self.scheduler.on_new_request(item)
        assert self.scheduler.get_num_new_matched_tokens(item, 0) == (tokens, True)
        blocks = KVCacheBlocks(([KVCacheBlock(block_id) for block_id in block_ids],))
        self.scheduler.update_state_after_alloc(item, blocks, tokens)
        return item

    def fill(self, tokens, block_ids):
        for seed, name in enumerate(layer_names(LAYERS)):
            generator = torch.Generator().manual_seed(seed)
            key, value = (torch.rand(tokens, HEADS, DIM, generator=generator).bfloat16() for _ in range(2))
            view = self.caches[name].view(32, HEADS, 2 * self.block, DIM)
            position = torch.arange(tokens)
            slots = torch.tensor(block_ids)[position // self.block] * self.block + position % self.block
            ops.cpu_attn_reshape_and_cache(key, value, *view.chunk(2, dim=2), slots, "vec", kv_cache_dtype="auto")

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


def step_until(done, *engines, limit_s=20.0):
    """Let engines step until the condition holds."""
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, "nothing happened within the limit"
        for engine in engines:
            engine.step()


def test_a_request_goes_from_one_block_size_to_another(make_engine):
    prefill, decode, expected = make_engine(block=32), make_engine(block=64), make_engine(block=64)
    prefill.fill(150, [4, 2, 9, 6, 5])
    expected.fill(150, [3, 8, 1])
    params = prefill.prefill("p-1", 150, [4, 2, 9, 6, 5])
    decode.load("d-1", 150, params, [3, 8, 1])
    step_until(lambda: decode.received and prefill.sent, decode, prefill)
    assert (decode.received, decode.failed, prefill.sent) == ({"d-1"}, set(), {"p-1"})
    for name in layer_names(LAYERS):
        assert torch.equal(decode.caches[name], expected.caches[name])
    stats = decode.worker.get_kv_connector_stats()
    assert stats.data["reads_received"] == 1
    assert decode.worker.build_kv_connector_stats(stats.to_dict()).reduce()["reads_received"] == 1


def test_an_aborted_waiting_request_frees_the_producer(make_engine):
    prefill, decode = make_engine(), make_engine()
    params = prefill.prefill("p-1", 64, [4, 2])
    item = request("d-1", 64, params)
    decode.scheduler.on_new_request(item)
    item.status = RequestStatus.FINISHED_ABORTED
    assert decode.scheduler.request_finished_all_groups(item, ([],)) == (False, None)
    step_until(lambda: prefill.sent, decode, prefill)
    assert prefill.sent == {"p-1"}
    assert not decode.received


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_another_model_is_refused_with_the_field_and_both_values(make_engine, caplog, policy):
    prefill, decode = make_engine(), make_engine(vocab_size=640, policy=policy)
    params = prefill.prefill("p-1", 64, [4, 2])
    decode.load("d-1", 64, params, [3, 8])
    step_until(lambda: decode.received, decode, prefill)
    assert decode.failed == {"d-1"}
    assert "model.vocabulary" in caplog.text
    assert "640" in caplog.text
    assert "512" in caplog.text


def test_the_same_model_under_another_path_is_the_same_model(make_engine):
    prefill, decode = make_engine(), make_engine(_name_or_path="/elsewhere", transformers_version="9")
    decode.load("d-1", 64, prefill.prefill("p-1", 64, [4, 2]), [3, 8])
    step_until(lambda: decode.received, decode, prefill)
    assert decode.failed == set()


def test_a_peer_that_is_not_there_fails_the_request_in_time(make_engine, free_port):
    prefill, decode = make_engine(), make_engine()
    params = prefill.prefill("p-1", 64, [4, 2]) | {"remote_port": free_port()}
    decode.load("d-1", 64, params, [3, 8])
    step_until(lambda: decode.received, decode)
    assert decode.failed == {"d-1"}


def test_a_reference_is_read_once(make_engine):
    prefill, decode = make_engine(), make_engine()
    params = prefill.prefill("p-1", 64, [4, 2])
    decode.load("d-1", 64, params, [3, 8])
    step_until(lambda: decode.received, decode, prefill)
    decode.scheduler.request_finished_all_groups(request("d-1", 64), ([3, 8],))
    decode.load("d-2", 64, params, [5, 6])
    step_until(lambda: "d-2" in decode.received, decode, prefill)
    assert decode.failed == {"d-2"}


def test_what_is_wrong_at_start_is_raised_at_start(tmp_path, free_port):
    with pytest.raises(DescriptionError, match="unknown key 'leese_s'"):
        Engine(tmp_path / "a", free_port(), extra={"leese_s": 3})
    with pytest.raises(UnsupportedError, match="unknown transport 'pigeon'; known"):
        Engine(tmp_path / "b", free_port(), extra={"transport": "pigeon"})


def test_a_hook_that_raises_is_logged_and_means_nothing(caplog):
    @guarded(list)
    def hook():
        raise RuntimeError("boom")

    assert hook() == []
    assert "hook failed; the engine goes on" in caplog.text
    assert "boom" in caplog.text


def test_the_plugin_may_register_twice():
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVPlanConnector") is KVPlanConnector
