"""Engines in processes of their own, each with its front desk and ranks: what dies with -9 and stops with SIGSTOP.

Children are forked from a server that has imported what they need: they share nothing with the test but their pipe.
Each carries out one command at a time and answers with its value or its error.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

from kvplan.planner import BlockTable
from kvplan.session import REASONS
from kvplan.testing.oracle import UNTOUCHED, elements
from kvplan.transport import create
from kvplan.wire.addresses import Address, parse_address
from tests.session.engines import QUICK, Engine
from tests.session.flaky import Flaky

ANSWER_S = 60.0
PRELOADED = ["tests.session.processes", "kvplan.transport.cma", "kvplan.transport.nixl", "nixl_cu12._bindings"]
"""Imported once, by the server that children are forked from; no thread and no socket exists there."""


class FailureLines(logging.Handler):
    """Counts the log lines about failed reads by reason; a line that lacks something of use is not counted."""

    WHOLE = re.compile(
        r"read failed request=\S+ reason=(\w+) peer=\S+ at=\S+ remote_request=\S+ detail=.+ meaning=.+ do=."
    )

    def __init__(self):
        super().__init__()
        self.reasons = Counter()

    def emit(self, record):
        found = self.WHOLE.match(record.getMessage())
        if found:
            self.reasons[found[1]] += 1


LINES = FailureLines()


def serve(pipe, name, shape, transport, options):
    """Carry out commands in the child until it is told to stop, or the parent is gone."""
    logging.getLogger("kvplan").addHandler(LINES)
    engine = Engine(name, shape, make_transport=lambda: Flaky(create(transport)), **options)
    engine.start()
    pipe.send((True, engine.desk.port))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            method, arguments, keywords = pipe.recv()
            if method == "stop":
                break
            try:
                pipe.send((True, COMMANDS.get(method, _call(method))(engine, *arguments, **keywords)))
            except Exception:  # noqa: BLE001 - it is told to the parent, whose test fails
                pipe.send((False, traceback.format_exc()))
    engine.close()


def _call(method):
    return lambda engine, *arguments, **keywords: getattr(engine, method)(*arguments, **keywords)


def _scribble(engine, tables, value=0x55):
    """Write over a request's blocks, as a later request would."""
    for memory in engine.memories:
        for region, held in zip(memory.rank.regions, memory.bytes, strict=True):
            for block in tables[0].block_ids:
                held[block * region.block_stride_bytes : (block + 1) * region.block_stride_bytes] = value


def _health(engine):
    """Threads that live, and unexpected errors."""
    return {
        "threads": sum(loop._thread.is_alive() for session in engine.sessions for loop in session._loops),
        "all_threads": sum(len(session._loops) for session in engine.sessions),
        "loop_errors": engine.total("loop_errors"),
        "live_offers": engine.total("live_offers"),
        "live_reads": engine.total("live_reads"),
        "quarantined": engine.total("quarantined_reads"),
        "resident_kib": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
        "debug": __debug__,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def _each(method):
    """Call a method of every rank's session."""

    def call(engine, *arguments):
        for session in engine.sessions:
            getattr(session, method)(*arguments)

    return call


def _holds(engine, tables, num_tokens):
    """Whether the ranks' blocks of one request hold its tokens; other blocks are not looked at."""
    return all(
        bytes(memory.bytes[e.region][e.offset : e.offset + len(e.value)]) == e.value
        for memory in engine.memories
        for e in elements(memory.rank, tables)
        if e.token is None or e.token < num_tokens
    )


def _keeps_out(engine, tables):
    """Whether no byte outside the request's blocks has been written."""
    blocks = set(tables[0].block_ids)
    for memory in engine.memories:
        for region, held in zip(memory.rank.regions, memory.bytes, strict=True):
            stride = region.block_stride_bytes
            others = set(range(region.num_blocks)) - blocks
            if any((held[block * stride : (block + 1) * stride] != UNTOUCHED).any() for block in others):
                return False
    return True


def _fail(engine, *, posts=0, polls=0, disconnects=0, hold=False):
    """Let every rank's transport fail so often, or hold back what has arrived."""
    for transport in engine.transports:
        transport.failing_posts, transport.failing_polls = posts, polls
        transport.failing_disconnects, transport.holding = disconnects, hold


def _ledger(engine):
    """How many reads have failed by reason: as reported to the engine, as counted, as logged."""
    engine.collect()
    reported = Counter(failure.reason for failed in engine.done["failed"] for failure in failed.values())
    counted = {reason: int(engine.total(f"failures.{reason}")) for reason in REASONS}
    return dict(reported), {reason: count for reason, count in counted.items() if count}, dict(LINES.reasons)


def _forget(engine, request_id):
    """Let an id be used, and reported, once more."""
    engine.collect()
    for ids in engine.done["sent"]:
        ids.discard(request_id)


def _close_in_midst(engine, *, let_go):
    """Close while a read is outstanding whose writes end meanwhile, or not; return what was reported about it."""
    closer = threading.Thread(target=engine.close)
    closer.start()
    if let_go:
        time.sleep(0.1)
        _fail(engine)
    closer.join()
    return engine.failures("local")


def _addresses(engine):
    """Where the engine listens."""
    control = [parse_address(session.hello().control_address) for session in engine.sessions]
    return [Address("127.0.0.1", engine.desk.port), *control]


COMMANDS = {
    "addresses": _addresses,
    "close_in_midst": _close_in_midst,
    "cancel": _each("cancel"),
    "fail": _fail,
    "forget": _forget,
    "health": _health,
    "holds": _holds,
    "keeps_out": _keeps_out,
    "ledger": _ledger,
    "read_many": lambda engine, reads: [engine.read(*read) for read in reads],
    "renew": _each("renew"),
    "scribble": _scribble,
    "withdraw": _each("withdraw"),
}


class EngineProcess:
    """One engine in a process of its own; methods of ``Engine`` are called by name.

    With ``ready=False`` it is started and not waited for: ``port = answer()`` does that.
    """

    def __init__(self, name, shape, *, transport="nixl", config=QUICK, ready=True, **options):
        self.name, self.block_size = name, shape.block_size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, name, shape, transport, {"config": config, **options}), daemon=True
        )
        self.process.start()
        theirs.close()
        self.port = self.answer() if ready else 0

    def call(self, method, *arguments, **keywords):
        self.begin(method, *arguments, **keywords)
        return self.answer()

    def begin(self, method, *arguments, **keywords):
        """Ask without waiting for the answer."""
        self._pipe.send((method, arguments, keywords))

    def answer(self):
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"{self.name} does not answer")
        good, value = self._pipe.recv()
        if not good:
            raise AssertionError(f"{self.name}: {value}")
        return value

    def table(self, num_tokens, *, first_block=1):
        return (BlockTable(0, tuple(range(first_block, first_block - -num_tokens // self.block_size))),)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    @contextlib.contextmanager
    def frozen(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(task.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            time.sleep(0.001)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def wait(self, method, *arguments, bound_s=15.0):
        """Call a method until it gives something; fail after the bound."""
        ends_at = time.monotonic() + bound_s
        while True:
            value = self.call(method, *arguments)
            if value:
                return value
            if time.monotonic() > ends_at:
                raise AssertionError(f"{self.name}.{method}{arguments} did not come true within {bound_s} s")
            time.sleep(0.003)

    def stop(self):
        """Let it end by itself; return its exit status, None when it does not end."""
        self._pipe.send(("stop", (), {}))
        self.process.join(10)
        return self.process.exitcode

    def close(self):
        if self.process.is_alive():
            with contextlib.suppress(BrokenPipeError, OSError):
                self._pipe.send(("stop", (), {}))
            self.process.join(10)
            if self.process.is_alive():
                self.kill()
        self._pipe.close()
        self.process.close()
