"""``kvplan bench`` between fresh processes and on live engines; the calibration file and its fit."""

from __future__ import annotations

import json
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvplan.cli import bench_measure
from kvplan.cli.app import app
from kvplan.cli.bench_endpoints import fresh_endpoints
from kvplan.cli.bench_measure import FRESH_SEED, Endpoint, Setting, measured, on_one_device
from kvplan.cli.calibration import Calibration, Cost, Sample, fit, read_calibration, write_calibration
from kvplan.errors import DescriptionError, TransportError
from kvplan.testing.processes import memory_range, pattern
from kvplan.transport import Device, MemoryRange
from kvplan.transport.memory import MemoryTransport
from tests.cli.live_engine import LiveEngine

QUICK = ("--mib", 1, "--rounds", 1, "--run-sizes", "256,4K,64K")


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_two_processes_here_are_measured_and_calibrated(tmp_path):
    result = run("bench", *QUICK, "--transport", "cma", "--output", tmp_path / "calibration.json")
    assert result.exit_code == 0, result.output
    assert "cma: two processes on one host" in result.stdout
    assert "us a descriptor" in result.stdout
    found = read_calibration(tmp_path / "calibration.json")
    assert list(found.transports) == ["cma"]
    cost = found.transports["cma"]
    assert [(sample.run_bytes, sample.num_runs) for sample in cost.samples] == [
        (256, 4096), (4096, 256), (65536, 16), (256, 1), (65536, 1),
    ]  # fmt: skip
    assert cost.bytes_per_s > 1e6
    assert found.scatter is not None
    assert found.machine.cores > 0
    text = json.loads((tmp_path / "calibration.json").read_text())
    assert list(text) == ["schema", "made_at", "kvplan", "machine", "transports", "scatter"]
    assert list(text["transports"]["cma"]) == ["post_s", "descriptor_s", "bytes_per_s", "origin", "samples"]
    assert list(text["transports"]["cma"]["samples"][0]) == ["run_bytes", "num_runs", "seconds"]


@pytest.mark.nixl
def test_a_request_is_replayed_over_nixl():
    with (
        LiveEngine("prefill-0", block_size=4, transport="nixl") as prefill,
        LiveEngine("decode-0", block_size=6, order="NHD", transport="nixl") as decode,
    ):
        words = ("--mib", 4, "--rounds", 2, "--run-sizes", "64,256", "--tokens", 16)
        result = run("bench", prefill.target, decode.target, *words)
    assert result.exit_code == 0, result.output
    assert "a request of 16 tokens" in result.stdout


@pytest.mark.nixl
def test_nixl_is_measured_too():
    result = run("bench", *QUICK, "--transport", "nixl")
    assert result.exit_code == 0, result.output
    assert "nixl: two processes on one host" in result.stdout


def test_a_live_engine_is_read_from_and_does_not_notice():
    with LiveEngine("prefill-0", parallel=2, block_size=4) as prefill, LiveEngine("decode-0", block_size=6) as decode:
        remote = prefill.ask("offer", name="cmpl-0", num_tokens=24)
        result = run("bench", prefill.target, "--mib", 1, "--rounds", 1, "--run-sizes", "256,1K,1M")
        assert result.exit_code == 0, result.output
        assert "from rank 0 of prefill-0" in result.stdout
        assert "1.0 KiB" in result.stdout.partition("scatter")[0]
        assert "1.0 MiB" not in result.stdout.partition("scatter")[0]
        decode.ask("read", name="local-0", remote=remote, num_tokens=24)
        assert decode.ask("wait", name="local-0")["reasons"] == []


def test_a_request_between_two_live_engines_is_replayed(tmp_path):
    with (
        LiveEngine("prefill-0", parallel=2, block_size=4) as prefill,
        LiveEngine("decode-0", parallel=3, block_size=6, order="NHD") as decode,
    ):
        words = ("bench", prefill.target, decode.target, "--mib", 1, "--rounds", 2, "--run-sizes", "64,256")
        result = run(*words, "--tokens", 16, "--output", tmp_path / "c.json")
        assert result.exit_code == 0, result.output
        shown = result.stdout.partition("a request of 16 tokens")[2]
        assert [name in shown for name in ("D0", "D1", "D2", "P0", "P1")] == [True] * 5
        too_long = run(*words, "--tokens", 1000)
        assert too_long.exit_code == 2
        assert "use fewer --tokens" in too_long.stderr


def test_engines_that_do_not_fit_are_not_replayed():
    with LiveEngine("a") as one, LiveEngine("b", compatibility={"model": "another"}) as other:
        result = run("bench", one.target, other.target, *QUICK[:4], "--run-sizes", "64")
    assert result.exit_code == 1, result.output
    assert "model: source tiny, destination another" in result.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (["--run-sizes", "a lot"], "no size in"),
        (["--run-sizes", "1"], "no size in"),
        (["--run-sizes", ","], "names no size"),
        (["--transport", "memory"], "stays inside one process"),
        (["--transport", "pigeon"], "known: cma, memory, nixl"),
        (["--output", "/no/such/folder/c.json"], "/no/such/folder is no folder"),
        (["somewhere:5600"], "tcp://host:port"),
        (["tcp://127.0.0.1:1", "--transport", "cma"], "--transport is for two processes here"),
        (["tcp://127.0.0.1:1"], "nobody listens there"),
    ],
)
def test_bad_input_is_a_sentence(words, said):
    result = run("bench", *words)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_figures_for_wrong_bytes_are_refused():
    with ExitStack() as stack:
        other = stack.enter_context(MemoryTransport())
        held = pattern(FRESH_SEED + 1, 1 << 16)
        other.register([memory_range(held)])
        transport = stack.enter_context(MemoryTransport())
        transport.connect("peer/0", other.metadata())
        end = Endpoint(transport, "peer/0", (memory_range(held),), "a liar", fresh=True)
        with pytest.raises(TransportError, match="wrong bytes"):
            measured(end, end.buffer(1 << 16), Setting(256, 16), 1, lambda: None)


def test_registered_memory_stays_while_its_transport_is_open():
    with MemoryTransport() as transport:
        end = Endpoint(transport, "peer/0", (), "nobody")
        addresses = {end.new_buffer(1 << 16).ctypes.data for _ in range(8)}
        assert len(addresses) == 8
        assert end.buffer(100).ctypes.data in addresses
        assert end.buffer(1 << 17).nbytes == 1 << 17


def test_an_engine_with_memory_of_several_kinds_is_measured_on_the_larger():
    small, large = MemoryRange(1 << 20, 10), MemoryRange(1 << 30, 1000, Device("cuda", 1))
    assert on_one_device([small, large]) == (large,)


def test_a_transport_that_never_ends_is_given_up(monkeypatch):
    from kvplan.transport import Batch, State

    monkeypatch.setattr(bench_measure, "PATIENCE_S", 0.05)
    with MemoryTransport() as other, MemoryTransport(on_post=lambda batch: State.PENDING) as transport:
        held, local = pattern(1, 64), np.zeros(64, np.uint8)
        other.register([memory_range(held)])
        transport.register([memory_range(local)])
        transport.connect("peer/0", other.metadata())
        with pytest.raises(TransportError, match="longer than"):
            bench_measure.timed(transport, Batch("peer/0", [local.ctypes.data], [held.ctypes.data], [64]))


@settings(deadline=None)
@given(st.floats(0, 1e-3), st.floats(1e-8, 1e-4), st.floats(1e8, 1e11))
def test_the_fit_finds_what_the_samples_were_made_of(post_s, descriptor_s, bytes_per_s):
    truth = Cost(post_s=post_s, descriptor_s=descriptor_s, bytes_per_s=bytes_per_s)
    sizes = [(256, 1), (256, 16384), (4096, 8192), (65536, 512), (1 << 20, 32), (1 << 20, 1)]
    samples = [Sample(run, count, truth.seconds(run * count, count)) for run, count in sizes]
    found = fit(samples)
    for sample in samples:
        assert found.seconds(sample.run_bytes * sample.num_runs, sample.num_runs) == pytest.approx(
            sample.seconds, rel=1e-3
        )


@given(
    st.lists(st.tuples(st.integers(8, 1 << 20), st.integers(1, 1 << 14), st.floats(1e-7, 10)), min_size=1, max_size=9)
)
def test_a_fit_is_never_negative_whatever_was_measured(rows):
    found = fit([Sample(*row) for row in rows])
    assert found.post_s >= 0
    assert found.descriptor_s >= 0
    assert found.bytes_per_s > 0


def test_a_calibration_survives_its_file(tmp_path):
    written = Calibration(transports={"nixl": Cost(post_s=1e-5, descriptor_s=2e-6, bytes_per_s=1e10)})
    write_calibration(tmp_path / "c.json", written)
    assert read_calibration(tmp_path / "c.json") == written


def test_explain_reckons_with_what_was_measured(tmp_path):
    description = tmp_path / "e.yaml"
    layers = 'name: "layer.{0..1}", kind: attention, num_kv_heads: 4, head_dim: 128, dtype: bfloat16'
    description.write_text(f"engine_id: e\nmodel: {{layers: [{{{layers}}}]}}\ncache: {{num_blocks: 100}}\n")
    cost = Cost(post_s=0, descriptor_s=7e-6, bytes_per_s=3e9)
    write_calibration(tmp_path / "c.json", Calibration(transports={"cma": cost}))
    result = run("explain", description, description, "--calibration", tmp_path / "c.json")
    assert result.exit_code == 0, result.output
    assert "at 3 GB/s a rank and 7 us a descriptor" in result.stdout
    empty = tmp_path / "empty.json"
    write_calibration(empty, Calibration())
    for path, said in ((empty, "about no transport"), (tmp_path / "missing.json", "cannot be read")):
        result = run("explain", description, description, "--calibration", path)
        assert result.exit_code == 2
        assert said in result.stderr


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "no calibration file"),
        ('{"schema": 9}', "has schema 9; this kvplan reads 1"),
        ('{"transports": {"nixl": {"post_s": -1, "descriptor_s": 0, "bytes_per_s": 1}}}', r"transports\[...\].post_s"),
    ],
    ids=["no json", "newer schema", "negative"],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, said):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(DescriptionError, match=said):
        read_calibration(path)
    with pytest.raises(DescriptionError, match="cannot be read"):
        read_calibration(tmp_path / "missing.json")


def test_what_is_not_installed_is_left_out_unless_it_is_named(monkeypatch):
    from kvplan.cli import bench_endpoints
    from kvplan.errors import UnsupportedError

    def create(name):
        if name == "nixl":
            raise UnsupportedError("nixl is not installed")
        return real(name)

    real = bench_endpoints.create
    monkeypatch.setattr(bench_endpoints, "create", create)
    with ExitStack() as stack:
        assert list(fresh_endpoints([], 1 << 16, stack)) == ["cma"]
        with pytest.raises(UnsupportedError, match="not installed"):
            fresh_endpoints(["nixl"], 1 << 16, stack)
