"""``kvplan top``: one frame of live engines, its JSON, its errors; merging and drawing as pure functions."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvplan.cli.app import app
from kvplan.cli.top_model import History, Sample, merged_leases, merged_peers, merged_reads, quantile
from kvplan.cli.top_screen import frame
from kvplan.session.stats import Stats
from kvplan.wire.status import FailureLine, LeaseLine, PeerLine, ReadLine, Status
from tests.cli.live_engine import LiveEngine, move

TWICE = ("released", "claimed_by_another")
"""Why a second read of one reference is refused: the first is over on that rank, or not yet."""
PATIENT = {"claim_park_s": 30.0, "claim_timeout_s": 60.0, "transfer_timeout_s": 60.0, "lease_s": 60.0}


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def engines():
    with (
        LiveEngine("prefill-0", parallel=2, block_size=4, **PATIENT) as prefill,
        LiveEngine("decode-0", parallel=3, block_size=6, order="NHD", **PATIENT) as decode,
    ):
        move(prefill, decode, "cmpl-0")
        used = prefill.ask("offer", name="cmpl-1", num_tokens=24)
        for name, failed in (("local-1", False), ("local-2", True)):
            decode.ask("read", name=name, remote=used, num_tokens=24)
            assert bool(decode.ask("wait", name=name)["reasons"]) is failed
        prefill.ask("offer", name="cmpl-waits", num_tokens=24)
        early = prefill.ask("reference", name="cmpl-early", num_tokens=24)
        decode.ask("read", name="local-early", remote=early, num_tokens=24)
        yield prefill, decode


def test_once_shows_both_sides_of_what_happens(engines):
    prefill, decode = engines
    result = run("top", "--once", prefill.target, decode.target)
    assert result.exit_code == 0, result.output
    shown = result.output
    assert prefill.target in shown
    assert f":{decode.pid}" in shown
    for words in ("2 received", "1 failed", "1 leases", "nobody yet", "cmpl-waits", "local-early"):
        assert words in shown, words
    assert "the grant of rank" in shown
    assert f"127.0.0.1:{prefill.port}" in shown
    failure = next(line for line in shown.splitlines() if "local-2" in line)
    assert any(reason in failure for reason in TWICE)


def test_json_is_what_the_engines_say(engines):
    prefill, decode = engines
    result = run("top", "--json", prefill.target, decode.target)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["schema"] == 1
    offering, reading = found["engines"]
    assert [rank["rank"] for rank in reading["ranks"]] == [0, 1, 2]
    assert {rank["engine_id"] for rank in offering["ranks"]} == {"prefill-0"}
    for rank in offering["ranks"]:
        assert rank["values"]["live_offers"] == 1
        assert rank["values"]["offers_ended"] == 2
        assert [lease["request_id"] for lease in rank["leases"]] == ["cmpl-waits"]
        assert 0 < rank["leases"][0]["left_s"] <= 60
    for rank in reading["ranks"]:
        values = rank["values"]
        assert values["reads_received"] == 2
        assert sum(values[f"failures.{reason}"] for reason in TWICE) == values["reads_failed"] == 1
        assert values[f"peer_reads_received.127.0.0.1:{prefill.port}"] == 2
        assert values[f"peer_received_bytes.127.0.0.1:{prefill.port}"] == values["received_bytes"] > 0
        assert values["handshake_seconds.count"] == 1
        assert values["read_seconds.count"] == 2
        assert values["transfers"] == values["transfer_seconds.count"] > 0
        assert values["claim_seconds.count"] >= 2
        assert values["loop_errors"] == 0
        assert rank["peers"][0]["state"] == "ready"
        [read] = rank["reads"]
        assert (read["request_id"], read["state"]) == ("local-early", "reading")
        assert rank["failures"][0]["request_id"] == "local-2"
    refused = [rank["values"][f"refusals.{reason}"] for rank in offering["ranks"] for reason in TWICE]
    assert sum(refused) == sum(rank["values"]["claims_refused"] for rank in offering["ranks"]) >= 3
    assert found["engines"][0]["front_desk"]["values"]["status_requests"] >= 1


@pytest.mark.nixl
def test_over_nixl():
    with LiveEngine("prefill-0", transport="nixl") as prefill, LiveEngine("decode-0", transport="nixl") as decode:
        move(prefill, decode, "cmpl-0")
        [engine] = json.loads(run("top", "--json", decode.target).stdout)["engines"]
    [rank] = engine["ranks"]
    assert rank["transport"] == "nixl"
    assert rank["values"]["reads_received"] == 1
    assert rank["values"]["transferred_bytes"] > 0
    assert rank["values"]["transfer_seconds.sum"] > 0


def test_one_engine_that_is_away_does_not_hide_the_other(engines):
    prefill, _ = engines
    with LiveEngine("short-lived") as gone:
        away = gone.target
    result = run("top", "--once", prefill.target, away)
    assert result.exit_code == 2
    assert "cmpl-waits" in result.output
    assert f"error: {away.removeprefix('tcp://')}: nobody listens there" in result.stderr


def test_keys_and_readiness_are_sentences():
    with LiveEngine("locked-0", key="the key of this engine", publish=False) as engine:
        for words, said in (
            (["--key", "the key of this engine"], "not ready"),
            (["--key", "the key of another"], "not accepted"),
            ([], "needs a key"),
        ):
            result = run("top", "--once", engine.target, *words)
            assert result.exit_code == 2
            assert said in result.stderr
        engine.ask("publish")
        result = run("top", "--once", engine.target, "--key", "the key of this engine")
        assert result.exit_code == 0, result.output
        assert "locked-0" in result.output


def test_a_target_that_is_no_address():
    result = run("top", "--once", "localhost:5600x")
    assert result.exit_code == 2
    assert "tcp://host:port" in result.stderr


def _terminal(command, until, end, bound_s=30.0):
    """Run a command in a terminal until it has shown something; end it by a key or a signal; return its status."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        env={**os.environ, "COLUMNS": "160", "LINES": "60"},
    )  # fmt: skip
    os.close(follower)
    shown, ends_at, ended = b"", time.monotonic() + bound_s, False
    try:
        while time.monotonic() < ends_at:
            ready, _, _ = select.select([leader], [], [], 0.1)
            try:
                shown += os.read(leader, 65536) if ready else b""
            except OSError:  # the terminal is gone with the child
                break
            if until in shown and not ended:
                ended = True
                end(leader, child)
            if child.poll() is not None and not ready:
                break
        return child.wait(5), shown
    finally:
        if child.poll() is None:
            child.kill()
            child.wait(5)
        os.close(leader)


@pytest.mark.parametrize("how", ["q", "ctrl-c"])
def test_the_live_view_leaves_with_q_and_with_ctrl_c(engines, how):
    def end(leader, child):
        if how == "q":
            os.write(leader, b"xq")
        else:
            child.send_signal(signal.SIGINT)

    command = [sys.executable, "-m", "kvplan", "top", engines[1].target, "--interval", "0.2"]
    status, shown = _terminal(command, b"local-early", end)
    assert status == 0, shown[-2000:].decode(errors="replace")
    assert b"Traceback" not in shown


def test_without_a_terminal_one_frame_is_printed(engines):
    command = [sys.executable, "-m", "kvplan", "top", engines[0].target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    assert "cmpl-waits" in done.stdout


def status(rank, **parts):
    return Status(role="rank", engine_id="decode-0", rank=rank, num_ranks=2, **parts)


def test_lines_of_one_request_become_one():
    here = ReadLine("r1", "p", "reading", "bytes", 2.0, 100, 100)
    slower = ReadLine("r1", "p", "reading", "the grant of rank 1", 3.0, 100, 50)
    reads = [status(0, reads=(here, ReadLine("r2", "p", "waiting", "hello", 9.0))), status(1, reads=(slower,))]
    first, second = merged_reads(reads)
    assert (first.request_id, second.request_id) == ("r2", "r1")
    assert (second.num_bytes, second.arrived_bytes, second.num_ranks, second.age_s) == (200, 150, 2, 3.0)
    assert second.waits_for == "the grant of rank 1"
    leases = [
        status(0, leases=(LeaseLine("a", "open", "", 5.0),)),
        status(1, leases=(LeaseLine("a", "claimed", "d", 3.0),)),
    ]
    [lease] = merged_leases(leases)
    assert (lease.left_s, lease.reader, lease.num_ranks) == (3.0, "d", 2)


def test_the_worst_state_of_a_peer_counts_and_its_bytes_add_up():
    values = {"peer_received_bytes.h:1": 10.0, "peer_reads_received.h:1": 1.0}
    ranks = [
        status(0, peers=(PeerLine("p", "h:1", "ready", 2),), values=values),
        status(1, peers=(PeerLine("p", "h:1", "suspect", 1),), values=values),
    ]
    [peer] = merged_peers(ranks)
    assert (peer.state, peer.received_bytes, peer.reads_received, peer.num_reads) == ("suspect", 20, 1, 2)


def test_rates_are_between_two_samples_and_survive_a_restart():
    history = History()

    def sample(at, num_bytes):
        values = {"transferred_bytes": num_bytes, "reads_received": num_bytes / 1e9}
        return Sample("tcp://h:1", at, ranks=(status(0, values=values), status(1, values=values)))

    assert history.add(sample(10.0, 1e9)).gigabytes == 0
    rates = history.add(sample(12.0, 4e9))
    assert (rates.gigabytes, rates.reads) == (3.0, 1.5)
    assert history.add(sample(13.0, 1e9)).gigabytes == 2.0
    assert history.gigabytes == [3.0, 2.0]


def test_quantiles_of_a_snapshot():
    stats = Stats()
    assert quantile(stats.snapshot(), "read_seconds", 0.5) is None
    for seconds in [0.003] * 98 + [4.0, 400.0]:
        stats.observe("read_seconds", seconds)
    assert quantile(stats.snapshot(), "read_seconds", 0.5) == 0.005
    assert quantile(stats.snapshot(), "read_seconds", 0.99) == 5.0
    assert quantile(stats.snapshot(), "read_seconds", 1.0) == float("inf")


def test_what_peers_say_is_never_markup():
    name = "[bold red]x[/bold red]"
    desk = Status(role="front_desk", engine_id=name, facts={"info.model": name})
    rank = status(
        0, host=name, transport=name, peers=(PeerLine(name, name, name, 1, name),),
        reads=(ReadLine(name, name, name, name, 1.0),), leases=(LeaseLine(name, name, name, 1.0),),
        failures=(FailureLine(1.0, name, name, name, name, name),),
    )  # fmt: skip
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(frame([(Sample("tcp://h:1", 0.0, desk, (rank,)), History().add(Sample("", 0.0)), [])], rows=5))
    assert console.export_text().count(name) >= 12


def test_tables_say_how_much_they_leave_out():
    leases = tuple(LeaseLine(f"r{number}", "open", "", 5.0 + number) for number in range(20))
    desk = Status(role="front_desk", engine_id="prefill-0")
    sample = Sample("tcp://h:1", 0.0, desk, (status(0, leases=leases),))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(frame([(sample, History().add(sample), [])], rows=3))
    text = console.export_text()
    assert "Leases (3 of 20)" in text
    assert "r2" in text
    assert "r3" not in text
