"""Options, prompts, metrics and patience of the engine harness, without vLLM: a small server stands for an engine."""

from __future__ import annotations

import json
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from kvplan.engines import KVPLAN, EngineOptions, Fleet, external_tokens, make_prompt, prompt_text, read_metrics, total
from kvplan.engines.engine import Engine, stage_of, wait_all
from kvplan.engines.models import build_model, build_model_apart
from kvplan.engines.options import Ports, command_line, environment
from kvplan.engines.ports import PortPool
from kvplan.engines.prompts import completion_body
from kvplan.errors import EngineError
from kvplan.proxy import serve_in_thread

PORTS = Ports(api=21001, side_channel=21002)


def options(**fields):
    return EngineOptions(name="one", model=Path("/m"), **fields)


def test_the_command_line_says_the_geometry():
    line = command_line(options(tp=2, block_size=64, connector=KVPLAN, num_blocks=9), PORTS)
    text = " ".join(line)
    assert "--tensor-parallel-size 2" in text
    assert "--block-size 64" in text
    assert "--num-gpu-blocks-override 9" in text
    config = json.loads(line[line.index("--kv-transfer-config") + 1])
    assert config == {"kv_connector": "KVPlanConnector", "kv_role": "kv_both"}


def test_an_engine_by_itself_has_no_connector():
    assert "--kv-transfer-config" not in command_line(options(), PORTS)


def test_given_environment_wins_and_the_rest_is_inherited():
    env = environment(options(env=(("OMP_NUM_THREADS", "7"),)), PORTS, scratch=Path("/s"), inherited={"A": "b"})
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["A"] == "b"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "21002"


def test_ports_are_free_and_handed_out_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        pool = PortPool(first=port, last=port)
        with pytest.raises(EngineError, match="no free TCP port"):
            pool.take()
    assert pool_of_two() == {30_001, 30_002}


def pool_of_two():
    pool = PortPool(first=30_001, last=30_002)
    return {pool.take(), pool.take()}


def test_prompts_are_repeatable_and_share_no_prefix():
    assert make_prompt(50, seed=3) == make_prompt(50, seed=3)
    assert len({tuple(make_prompt(length, seed=seed)[:4]) for length in (50, 51) for seed in range(20)}) == 40
    assert min(make_prompt(500)) >= 5


def test_a_body_asks_for_exactly_so_many_tokens():
    body = completion_body([7], num_tokens=3, stream=True)
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (3, True, 0, True)


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("", "importing its libraries"),
        ("INFO non-default args: {}", "reading its configuration"),
        ("INFO non-default args: {}\nGPU KV cache size: 9", "warming up"),
    ],
)
def test_the_stage_is_the_furthest_one_in_the_log(tmp_path, text, stage):
    log = tmp_path / "log"
    log.write_text(text)
    assert stage_of(log) == stage


METRICS = """
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 40.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="external_kv_transfer"} 2.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 5.0
"""


def test_metrics_are_summed_over_engines_and_read_by_source():
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    app = Starlette(routes=[Route("/metrics", lambda request: PlainTextResponse(METRICS))])
    with serve_in_thread(app, host="127.0.0.1", port=0) as url:
        metrics = read_metrics(url)
    assert external_tokens(metrics) == 42
    assert total(metrics, "vllm:prompt_tokens_by_source_total") == 47


@pytest.fixture
def stub(tmp_path, monkeypatch):
    def make(code):
        monkeypatch.setattr(
            "kvplan.engines.engine.command_line",
            lambda options, ports: [sys.executable, "-c", textwrap.dedent(code), str(ports.api)],
        )
        engine = Engine(options(), Ports(api=PortPool().take(), side_channel=1), folder=tmp_path)
        engine.start()
        made.append(engine)
        return engine

    made = []
    yield make
    for engine in made:
        engine.stop(grace_s=1.0)


SERVES = """
    import http.server, sys
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_an_engine_that_serves_is_waited_for_and_stopped(stub):
    engine, seen = stub(SERVES), []
    wait_all([engine], timeout_s=20, on_progress=seen.append)
    assert seen[-1].serving
    assert 0 < engine.start_s < 20
    engine.stop()
    assert engine.members() == []
    assert not engine.alive
    assert engine.stop() == []


def test_an_engine_that_ends_says_why(stub):
    engine = stub("raise SystemExit('model is missing')")
    with pytest.raises(EngineError, match=r"(?s)'one' ended with exit status 1.*model is missing"):
        wait_all([engine], timeout_s=20)


def test_the_cause_is_named_where_the_end_of_the_log_hides_it(stub):
    engine = stub("print('KeyError: the cause'); print('consequence\\n' * 100); raise SystemExit(1)")
    with pytest.raises(EngineError, match=r"KeyError: the cause\nThe end of its log"):
        wait_all([engine], timeout_s=20)


def test_an_engine_that_never_serves_is_given_up(stub):
    engine = stub("import time; print('busy', flush=True); time.sleep(60)")
    with pytest.raises(EngineError, match=r"(?s)did not serve within 1 s.*busy"):
        wait_all([engine], timeout_s=1)


def test_an_engine_that_ignores_sigterm_is_killed(stub):
    engine = stub("""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(60)
    """)
    while "deaf" not in engine.log_text().splitlines():
        assert engine.alive
    assert engine.stop(grace_s=0.2) == [engine.pid]
    assert engine.members() == []


def test_a_fleet_stops_what_it_started_when_one_fails(tmp_path, monkeypatch):
    codes = iter([SERVES, "raise SystemExit(3)"])
    monkeypatch.setattr(
        "kvplan.engines.engine.command_line",
        lambda options, ports: [sys.executable, "-c", textwrap.dedent(next(codes)), str(ports.api)],
    )
    with Fleet() as fleet:
        with pytest.raises(EngineError, match="exit status 3"):
            fleet.start(options(), options())
        assert fleet.engines == ()
        folder = fleet.folder
    assert not folder.exists()


def test_a_tiny_model_is_the_same_each_time_and_its_words_are_its_ids(tmp_path):
    from tokenizers import Tokenizer

    first, second = (build_model_apart("llama", tmp_path / name) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    ids = list(range(5, 512))
    assert Tokenizer.from_file(str(first / "tokenizer.json")).encode(prompt_text(ids)).ids == ids


def test_an_unknown_model_is_refused_with_the_known_names(tmp_path):
    with pytest.raises(EngineError, match="llama-one-kv-head"):
        build_model("gpt-9", tmp_path)
