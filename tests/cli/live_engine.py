"""A live engine in a process of its own, without vLLM: front desk, rank sessions, real memory, a real transport.

The process is this module run as a program. It takes one JSON line that says what to be, then commands, one a line, on
standard input, and answers on a private pipe (transports print on standard output).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import replace

from kvplan.planner import BlockTable
from kvplan.session import RemoteRef
from kvplan.testing.strategies import Shape
from kvplan.transport import create
from tests.session.engines import QUICK, Engine, wait_until

PROGRAM = "import sys; from tests.cli.live_engine import serve; sys.exit(serve(int(sys.argv[1])))"
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 20.0


class LiveEngine:
    """The engine as a test sees it. Use it as a context manager."""

    def __init__(self, name, *, parallel=1, block_size=4, order="HND", packing="split", transport="cma", key="",
                 publish=True, compatibility=None, **config):  # fmt: skip
        ours, theirs = os.pipe()
        self.name = name
        self._child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs)],
            stdin=subprocess.PIPE, stdout=sys.__stderr__.fileno(), pass_fds=(theirs,),
        )  # fmt: skip
        os.close(theirs)
        self._answers, self._buffer = ours, b""
        shape = {"parallel": parallel, "block_size": block_size, "order": order, "packing": packing}
        options = {"side_channel_key": key, **config}
        what = {"name": name, "shape": shape, "transport": transport, "publish": publish, "config": options}
        self._send({**what, "compatibility": compatibility})
        self.port = self._receive(START_TIMEOUT_S)["port"]

    @property
    def target(self):
        """What a person writes on the command line."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def pid(self):
        return self._child.pid

    def ask(self, do, **arguments):
        self._send({"do": do, **arguments})
        return self._receive(ANSWER_TIMEOUT_S)

    def close(self):
        if self._child.poll() is None:
            self._child.stdin.close()
            try:
                self._child.wait(10)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait(10)
        self._child.stdin.close()
        if self._answers is not None:
            os.close(self._answers)
            self._answers = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _send(self, message):
        self._child.stdin.write(json.dumps(message).encode() + b"\n")
        self._child.stdin.flush()

    def _receive(self, timeout_s):
        ends_at = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, ends_at - time.monotonic()))
            part = os.read(self._answers, 1 << 20) if ready else b""
            assert part, f"engine {self.name} did not answer"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def move(prefill, decode, name, *, num_tokens=24):
    """Move one request, and wait until both sides are done with it."""
    remote = prefill.ask("offer", name=name, num_tokens=num_tokens)
    decode.ask("read", name=f"local-{name}", remote=remote, num_tokens=num_tokens)
    assert decode.ask("wait", name=f"local-{name}")["reasons"] == []


def serve(answers):
    """Run as the engine's process until standard input ends."""
    order = json.loads(sys.stdin.readline())
    shape = order["shape"]
    shape = Shape(shape["parallel"], shape["block_size"], shape["block_size"], shape["order"], shape["packing"])
    engine = Engine(
        order["name"], shape, config=replace(QUICK, **order["config"]), compatibility=order["compatibility"],
        make_transport=lambda: create(order["transport"]),
    )  # fmt: skip
    engine.start(publish=order["publish"])
    with os.fdopen(answers, "wb") as pipe:
        _answer(pipe, port=engine.desk.port)
        for line in sys.stdin:
            _answer(pipe, **_obey(engine, json.loads(line)))
    engine.close()
    return 0


def _obey(engine, order):
    match order["do"]:
        case "offer":
            tables = engine.table(order["num_tokens"])
            engine.fill(tables)
            remote = engine.offer(order["name"], tables, order["num_tokens"], lease_s=order.get("lease_s", 0.0))
            return _remote_text(remote)
        case "reference":
            return _remote_text(engine.reference(order["name"], engine.table(order["num_tokens"]), order["num_tokens"]))
        case "read":
            tables = engine.table(order["num_tokens"], first_block=order.get("first_block", 3))
            engine.read(order["name"], _remote(order["remote"]), tables)
        case "wait":
            reasons = wait_until(lambda: engine.failures(order["name"]), what=order["name"])
            return {"reasons": [reason for reason in reasons if reason != "received"]}
        case "publish":
            engine.publish()
    return {}


def _remote_text(remote):
    tables = [[table.first_token, list(map(int, table.block_ids))] for table in remote.tables]
    return {"engine_id": remote.engine_id, "host": remote.host, "port": remote.port, "request_id": remote.request_id,
            "generation": remote.generation, "tables": tables, "num_tokens": remote.num_tokens}  # fmt: skip


def _remote(text):
    tables = tuple(BlockTable(first, tuple(ids)) for first, ids in text["tables"])
    return RemoteRef(**{**text, "tables": tables})


def _answer(pipe, **values):
    pipe.write(json.dumps(values).encode() + b"\n")
    pipe.flush()
