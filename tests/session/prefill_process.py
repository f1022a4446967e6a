"""A prefill engine in a process of its own: the parent's half and the child's half, which talk in JSON lines.

The child is this module run as a program. Its standard output goes to standard error, because carriers print.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
from pathlib import Path

from kvplan.planner import BlockTable
from kvplan.session import RemoteRef
from kvplan.transport import create
from tests.session.atoms import atoms_of, content, fine_components
from tests.session.engines import Engine
from tests.session.hybrids import declared, tables

ROOT = Path(__file__).parent.parent.parent
BOUND_S = 60.0


class Bare:
    """A rank's layout where its memory really is."""

    def __init__(self, rank):
        self.rank = rank


class PrefillProcess:
    """The parent's half: as much of ``Engine`` as a world needs."""

    def __init__(self, knobs, other, *, transport, num_tokens, config):
        theirs, ours = os.pipe()
        order = {"knobs": knobs, "other": other, "transport": transport, "num_tokens": num_tokens,
                 "config": dataclasses.asdict(config)}  # fmt: skip
        path = os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.session.prefill_process", str(ours)],
            stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), pass_fds=(ours,), cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        os.close(ours)
        self._answers = os.fdopen(theirs, "rb")
        hello = self._ask(order)
        layout, self.block_tokens = declared("prefill-0", **knobs)
        self.port, self.pid = hello["port"], self._child.pid
        self.memories = [
            Bare(dataclasses.replace(rank, regions=tuple(
                dataclasses.replace(region, base=base) for region, base in zip(rank.regions, bases, strict=True))))
            for rank, bases in zip(layout.ranks, hello["bases"], strict=True)
        ]  # fmt: skip

    def start(self):
        return self

    def offer(self, name, source, num_tokens):
        self._ask({"do": "offer", "name": name})
        held = tuple(BlockTable(table.first_token, table.block_ids) for table in source)
        return RemoteRef("prefill-0", "127.0.0.1", self.port, name, "g1", held, num_tokens)

    def sent(self, name):
        return self._ask({"do": "sent", "name": name})["sent"]

    def total(self, name):
        return self._ask({"do": "total", "name": name})["total"]

    def close(self):
        self._child.stdin.close()
        try:
            self._child.wait(10.0)
        finally:
            self._child.kill()
            self._child.wait(5.0)
            self._answers.close()

    def _ask(self, order):
        self._child.stdin.write(json.dumps(order).encode() + b"\n")
        self._child.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], BOUND_S)
        line = self._answers.readline() if ready else b""
        assert line, f"the prefill process {self._child.pid} does not answer {order.get('do', 'the first line')}"
        return json.loads(line)


def serve(answers):
    """Run the child's half until standard input ends."""
    from kvplan.session import SessionConfig

    def answer(**values):
        answers.write(json.dumps(values).encode() + b"\n")
        answers.flush()

    order = json.loads(sys.stdin.readline())
    layout, block_tokens = declared("prefill-0", **order["knobs"])
    other, _ = declared("decode-0", **order["other"])
    engine = Engine("prefill-0", None, layout=layout, config=SessionConfig.of(order["config"]),
                    make_transport=lambda: create(order["transport"]))  # fmt: skip
    source = tables(order["num_tokens"], block_tokens)
    fill(engine.memories, source, order["num_tokens"], fine_components(layout, other))
    engine.start()
    answer(port=engine.desk.port, bases=[[r.base for r in memory.rank.regions] for memory in engine.memories])
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "offer":
            engine.offer(asked["name"], source, order["num_tokens"])
            answer()
        elif asked["do"] == "sent":
            answer(sent=engine.sent(asked["name"]))
        else:
            answer(total=engine.total(asked["name"]))
    engine.close()


def fill(memories, source, num_tokens, fine):
    """Write every atom's content; return {key: (address, bytes)} by rank."""
    import ctypes

    found = [atoms_of(memory.rank, source, num_tokens, fine) for memory in memories]
    for atoms in found:
        for key, (address, size) in atoms.items():
            ctypes.memmove(address, content(key, size), size)
    return found


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        serve(answers)
