"""Pictures of commands on live engines for docs/operations.md. Run it to draw them anew:

    python -m tests.docs.pictures

Two engines of a model with 16 layers run in this process, TP 2 and TP 1, with real memory, sockets and CMA; requests
move between them while `top` and `explain` look. Addresses are replaced by those of an example cluster.
"""

from __future__ import annotations

import io
import re
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvplan.cli.engine_file import load_pair
from kvplan.cli.flows import Cost, flows
from kvplan.cli.pairs import proved_plan
from kvplan.cli.sample import roomy, sample_request
from kvplan.cli.summary_table import closing_lines, group_table, pair_table
from kvplan.cli.top_model import History
from kvplan.cli.top_screen import frame
from kvplan.cli.top_watch import Watch
from kvplan.layouts import AddressSpace, engine_layout
from kvplan.layouts.description import read_description
from kvplan.planner import BlockTable
from kvplan.session import FrontDesk, Identity, Offer, RankSession, ReadRequest, RemoteRef, SessionConfig
from kvplan.transport import MemoryRange, create
from tests.session.engines import in_memory, wait_until

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
LAYERS = 'name: "model.layers.{0..15}.self_attn.attn", kind: attention, num_kv_heads: 8, head_dim: 128, dtype: bfloat16'
PREFILL = (
    f"engine_id: prefill-0.7f3a\nmodel: {{layers: [{{{LAYERS}}}]}}\nparallel: {{tp: 2}}\ncache: {{num_blocks: 80}}\n"
)
DECODE = (
    f"engine_id: decode-0.c01d\nmodel: {{layers: [{{{LAYERS}}}]}}\n"
    "cache: {block_size: 32, num_blocks: 80, kv_layout: NHD}\n"
)
FACTS = {"model.layers": "16", "info.model": "meta-llama/Llama-3.2-1B", "info.dtype": "bfloat16"}
CONFIG = SessionConfig(claim_park_s=30.0, claim_timeout_s=60.0, handshake_timeout_s=1.0, lease_s=60.0)
NAMES = {"prefill": "10.0.3.11:5600", "decode": "10.0.3.12:5600"}
"""What stands in the pictures for the ports that the engines got."""


class Engine:
    """One engine in this process."""

    def __init__(self, text: str, stack: ExitStack) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            spec = read_description(file.name)
        self.layout, self.memories = in_memory(engine_layout(spec, AddressSpace()))
        self.name = self.layout.engine_id
        self.desk = FrontDesk(host="127.0.0.1", port=0, config=CONFIG)
        self.sessions = []
        for index, memory in enumerate(self.memories):
            transport = create("cma")
            transport.register([MemoryRange(held.ctypes.data, held.nbytes) for held in memory.bytes])
            identity = Identity(self.name, index, len(self.memories), FACTS)
            session = RankSession(identity=identity, layout=memory.rank, transport=transport, config=CONFIG)
            session.set_front_desk("127.0.0.1", self.desk.port)
            session.start()
            stack.callback(session.close)
            self.sessions.append(session)
        self.desk.start()
        stack.callback(self.desk.close)
        self.desk.publish(self.name, FACTS, [session.hello() for session in self.sessions])
        self.ended: dict[str, int] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.desk.port}"

    def reference(self, name: str, num_tokens: int) -> RemoteRef:
        tables = (BlockTable(0, tuple(range(num_tokens // 16))),)
        return RemoteRef(self.name, "127.0.0.1", self.desk.port, name, "g1", tables, num_tokens)

    def offer(self, name: str, num_tokens: int) -> RemoteRef:
        reference = self.reference(name, num_tokens)
        for session in self.sessions:
            session.offer(Offer(name, "g1", reference.tables, num_tokens))
        return reference

    def read(self, name: str, remote: RemoteRef) -> None:
        table = BlockTable(0, tuple(range(remote.num_tokens // 32)))
        for session in self.sessions:
            session.read(ReadRequest(name, remote, (table,)))

    def has_ended(self, name: str) -> bool:
        for session in self.sessions:
            results = session.take_results()
            for ended in (*results.received, *results.failed):
                self.ended[ended] = self.ended.get(ended, 0) + 1
        return self.ended.get(name) == len(self.sessions)


def draw(name: str, title: str, width: int, *parts: object, replaced: dict[str, str]) -> None:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for part in parts:
        console.print(part, highlight=False)
    svg = console.export_svg(title=title, unique_id=f"kvplan-{name}")
    for old, new in replaced.items():
        svg = svg.replace(old, new)
    (FOLDER / f"{name}.svg").write_text(svg)


def busy(prefill: Engine, decode: Engine) -> None:
    """Leave something of everything: refused, lost, waiting."""
    used = prefill.offer("cmpl-8d20", 512)
    for name in ("req-8d20", "req-8d20-again"):
        decode.read(name, used)
        wait_until(lambda name=name: decode.has_ended(name))
    lost = replace(prefill.reference("cmpl-77aa", 512), engine_id="prefill-9.0b1e", port=1)
    decode.read("req-77aa", lost)
    wait_until(lambda: decode.has_ended("req-77aa"))
    for number in range(3):
        prefill.offer(f"cmpl-9c1{number}", 512)
    decode.read("req-a001", prefill.reference("cmpl-a001", 512))


def main() -> None:
    with ExitStack() as stack:
        prefill, decode = Engine(PREFILL, stack), Engine(DECODE, stack)
        busy(prefill, decode)
        targets = [f"tcp://{engine.address}" for engine in (prefill, decode)]
        replaced = {prefill.address: NAMES["prefill"], decode.address: NAMES["decode"], "127.0.0.1:1": "10.0.3.19:5600"}
        with Watch(targets) as watch:
            histories, shown = [History(), History()], []
            for second in range(14):
                ends_at = time.monotonic() + 0.4
                number = 0
                while time.monotonic() < ends_at - 0.02 * (second % 5):
                    name = f"more-{second}-{number}"
                    decode.read(f"req-{name}", prefill.offer(f"cmpl-{name}", 1024))
                    wait_until(lambda name=f"req-{name}": decode.has_ended(name))
                    number += 1
                shown = [(s, h.add(s), h.gigabytes) for s, h in zip(watch.sample(), histories, strict=True)]
        title = f"kvplan top tcp://{NAMES['prefill']} tcp://{NAMES['decode']}"
        draw("top", title, 132, frame(shown, rows=6, hint="every 1 s; q leaves"), replaced=replaced)
        ours, theirs = (roomy(target, 1000) for target in load_pair(*targets))
        plan, cost = proved_plan(ours, theirs), Cost()
        found = flows(plan, sample_request(ours, theirs, 1000), cost)
        parts = (pair_table(found, plan, cost), group_table(found), *closing_lines(found, plan, cost, 1000))
        draw("explain-live", title.replace("top", "explain"), 150, *parts, replaced=replaced)
    for path in FOLDER.glob("*.svg"):
        assert not re.search(r"127\.0\.0\.1", path.read_text()), path


if __name__ == "__main__":
    main()
