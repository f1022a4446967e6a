"""How ``kvplan demo`` looks: progress while engines start, one line per prompt, a verdict. It runs nothing.

On a terminal, what is being waited for is drawn anew in place; elsewhere (a pipe, CI) each change is a line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table


class StartProgress(Protocol):
    """How far an engine's start is."""

    @property
    def engine(self) -> str:
        """Its name."""

    @property
    def stage(self) -> str:
        """What it does now."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since its launch."""

    @property
    def serving(self) -> bool:
        """Whether it is ready."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one prompt showed."""

    num_prompt_tokens: int
    same: bool = False
    """Whether the tokens are the single engine's."""
    num_external_tokens: int = 0
    """Prompt tokens whose cache came from the prefill engine."""
    num_bytes: int = 0
    num_descriptors: int = 0
    read_s: float = 0.0
    """From the first claim to the last byte, summed over decode's ranks."""
    elapsed_s: float = 0.0
    """The whole request, through the router."""
    failure: str = ""

    @property
    def good(self) -> bool:
        """The same tokens, and not computed anew. A single prompt token is always computed by decode itself."""
        expected = self.num_prompt_tokens if self.num_prompt_tokens > 1 else 0
        return not self.failure and self.same and self.num_external_tokens == expected


COLUMNS = ("prompt", "tokens", "from prefill", "bytes", "descriptors", "read", "request")
WIDTHS = (12, 10, 14, 12, 12, 10, 10)


class Screen:
    """Where the demo writes."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._latest: dict[str, StartProgress] = {}

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(escape(text))

    def error(self, text: str) -> None:
        """What went wrong, to standard error."""
        Console(stderr=True, highlight=False).print(f"[red]error:[/] {escape(text)}")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says what is being waited for, and how long it took."""
        begin = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(escape(what)):
                yield
        else:
            yield
        self._console.print(f"[dim]{time.monotonic() - begin:6.1f} s[/]  {escape(what)}")

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Shows what `progress` is told, while engines start."""
        self._latest = {}
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, transient=True, refresh_per_second=8) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None
        for progress in self._latest.values():
            self._console.print(_started(progress))

    def progress(self, now: StartProgress) -> None:
        """Takes how far one engine is."""
        before = self._latest.get(now.engine)
        self._latest[now.engine] = now
        if self._live is not None:
            self._live.update(self._progress_table())
        elif before is None or before.stage != now.stage:
            self._console.print(_started(now))

    def header(self, tp: tuple[int, int], block_size: tuple[int, int], connector: str) -> None:
        """Which geometries are about to meet, and the head of the table."""
        self._console.print(
            f"\nprefill TP {tp[0]}, blocks of {block_size[0]} tokens  ->  "
            f"decode TP {tp[1]}, blocks of {block_size[1]} tokens  (connector: {connector})\n"
        )
        self._console.print("[bold]" + _line(COLUMNS) + "[/]")

    def row(self, row: Row) -> None:
        """One prompt's line."""
        if row.failure:
            self._console.print(f"[red]{_line((f'{row.num_prompt_tokens} tokens', 'FAILED'))}[/]")
            self._console.print(f"    {escape(row.failure)}")
            return
        cells = (
            f"{row.num_prompt_tokens} tokens",
            "equal" if row.same else "DIFFERENT",
            f"{row.num_external_tokens} tokens",
            f"{row.num_bytes:,}",
            f"{row.num_descriptors:,}",
            f"{row.read_s * 1e3:.1f} ms",
            f"{row.elapsed_s * 1e3:.0f} ms",
        )
        self._console.print(f"[{'green' if row.good else 'red'}]{_line(cells)}[/]")

    def verdict(self, rows: Sequence[Row]) -> bool:
        """The last line; returns whether everything was as it should be."""
        num_good = sum(row.good for row in rows)
        good = bool(rows) and num_good == len(rows)
        text = f"{num_good} of {len(rows)} answers are those of a single engine, from cache that was moved."
        self._console.print(f"\n[{'green' if good else 'red'}]{text}[/]")
        return good

    def _progress_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for progress in self._latest.values():
            color = "green" if progress.serving else "yellow"
            table.add_row(
                f"[dim]{progress.elapsed_s:6.1f} s[/]", f"engine {progress.engine}", f"[{color}]{progress.stage}[/]"
            )
        return table


def _started(progress: StartProgress) -> str:
    return f"[dim]{progress.elapsed_s:6.1f} s[/]  engine {progress.engine}: {progress.stage}"


def _line(cells: Sequence[str]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=False))
