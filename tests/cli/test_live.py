"""Commands on live engines: real processes, a real transport, the side channel with and without a key."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from kvplan.cli.app import app
from kvplan.testing.strategies import ELEMENTS
from kvplan.wire.codec import refuse_version
from tests.cli.live_engine import LiveEngine
from tests.session.engines import TOTAL_HEADS
from tests.wire.test_asking import answering

KEY = "the key of these two engines"
LAYERS = f'name: "layer.{{0..1}}", kind: attention, num_kv_heads: {TOTAL_HEADS}, head_dim: {ELEMENTS}, dtype: bfloat16'
FILE = f"engine_id: planned\nmodel: {{layers: [{{{LAYERS}}}]}}\nparallel: {{tp: 2}}\ncache: {{num_blocks: 30}}\n"
"""The model of the live engines, as a person would describe a deployment that does not run yet."""


def run(*words, env=None):
    return CliRunner().invoke(app, [str(word) for word in words], env=env)


@pytest.fixture(scope="module")
def engines():
    with (
        LiveEngine("prefill-0", parallel=2, block_size=4) as prefill,
        LiveEngine("decode-0", parallel=3, block_size=6, order="NHD", packing="packed") as decode,
    ):
        yield prefill, decode


@pytest.fixture(scope="module")
def locked():
    with LiveEngine("locked-0", key=KEY) as engine:
        yield engine


def test_check_says_yes_of_two_live_engines(engines):
    prefill, decode = engines
    result = run("check", prefill.target, decode.target)
    assert result.exit_code == 0, result.output
    assert f"yes: {decode.target} can read the cache of {prefill.target}" in result.output
    assert "prefill-0" in result.output
    assert "decode-0" in result.output


def test_check_names_fields_that_only_live_engines_know(engines):
    with LiveEngine("other-0", compatibility={"model": "another", "dtype": "bfloat16", "info.tp": "1"}) as other:
        result = run("check", engines[0].target, other.target)
    assert result.exit_code == 1, result.output
    assert "model: source tiny, destination another" in result.output
    assert "what would work: serve the same model" in result.output


def test_explain_shows_the_flow_between_live_engines(engines, tmp_path):
    prefill, decode = engines
    picture = tmp_path / "live.svg"
    result = run("explain", prefill.target, decode.target, "--tokens", 48, "--picture", picture)
    assert result.exit_code == 0, result.output
    assert "P1 tp1" in result.output
    assert "D2 tp2" in result.output
    assert "readers per source rank" in result.output
    assert "prefill-0" in picture.read_text()


def test_a_file_and_a_live_engine_mix(engines, tmp_path):
    planned = tmp_path / "planned.yaml"
    planned.write_text(FILE)
    for pair in ((planned, engines[1].target), (engines[0].target, planned)):
        result = run("check", *pair)
        assert result.exit_code == 0, result.output
        assert "planned" in result.output
    planned.write_text(FILE.replace("bfloat16", "float16"))
    result = run("check", planned, engines[1].target)
    assert result.exit_code == 1
    assert "source float16, destination bfloat16" in result.output


def test_a_key_is_needed_given_or_wrong(locked, engines):
    given = run("check", locked.target, locked.target, "--key", KEY)
    assert given.exit_code == 0, given.output
    from_environment = run("check", locked.target, locked.target, env={"KVPLAN_SIDE_CHANNEL_KEY": KEY})
    assert from_environment.exit_code == 0, from_environment.output
    for words, said in (
        (("check", locked.target, locked.target), "needs a key"),
        (("check", locked.target, locked.target, "--key", "some other key of 16"), "not accepted"),
        (("explain", engines[0].target, engines[0].target, "--key", KEY), "has no key"),
    ):
        result = run(*words)
        assert result.exit_code == 2
        assert said in result.stderr
        assert "Traceback" not in result.output


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = run("check", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: 127.0.0.1:{port}: nobody listens there; is the engine running, and is this the port of its side "
        "channel (default 5600)?\n"
    )


def test_an_engine_that_is_not_ready():
    with LiveEngine("loading-0", publish=False) as engine:
        result = run("check", engine.target, engine.target)
        assert result.exit_code == 2
        assert "not ready: the engine's ranks have not been published yet; ask again" in result.stderr
        engine.ask("publish")
        assert run("check", engine.target, engine.target).exit_code == 0


def test_another_protocol():
    with answering(refuse_version(1)) as address:
        result = run("explain", f"tcp://{address}", f"tcp://{address}")
    assert result.exit_code == 2
    assert "protocol version" in result.stderr
    assert "install kvplan of the same release" in result.stderr


@pytest.mark.parametrize("target", ["tcp://", "tcp://host", "tcp://host:0", "tcp://host:http", "tcp://a b:1"])
def test_a_target_that_is_no_address(target):
    result = run("check", target, target)
    assert result.exit_code == 2
    assert "tcp://host:port" in result.stderr
