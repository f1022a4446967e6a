"""``kvplan top``: what live engines do right now, refreshed until q. Asking, merging and drawing are elsewhere."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from kvplan.cli.exits import BAD_INPUT, exits
from kvplan.cli.live import key_option
from kvplan.cli.top_model import History
from kvplan.cli.top_screen import frame
from kvplan.cli.top_watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Group

    from kvplan.cli.top_model import Sample

PIPE_WIDTH = 160
"""Columns when the output is no terminal."""
ONCE_S = 0.5
"""Time between the two samples of a single frame: rates need two."""


def add_to(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("top")(top)


def top(
    engines: list[str] = typer.Argument(help="Front desks of live engines, as tcp://host:port."),
    *,
    once: bool = typer.Option(False, "--once", help="Print one frame and leave."),
    as_json: bool = typer.Option(False, "--json", help="Print what the engines say as JSON and leave."),
    interval: float = typer.Option(1.0, "--interval", min=0.1, max=60.0, help="Seconds between two frames."),
    rows: int = typer.Option(8, "--rows", min=1, max=64, help="Most rows of each table."),
    key: str = key_option(),
) -> None:
    """Show peers, transfers in flight, throughput, leases and failures of live engines, until q.

    Exit status: 0 shown, 2 an engine could not be asked.
    """
    with exits():
        watch = Watch(engines, key=key)
    with watch:
        if as_json:
            _print_json(watch.sample())
            return
        screen = _Screen(watch, len(engines), rows)
        console = Console()
        if once or not console.is_terminal:
            console = console if console.is_terminal else Console(width=PIPE_WIDTH)
            screen.look()
            time.sleep(ONCE_S)
            console.print(screen.look())
            _leave_with_errors(screen.last)
            return
        _run(screen, console, interval)


class _Screen:
    """Frames, one after the other."""

    def __init__(self, watch: Watch, num_engines: int, rows: int) -> None:
        self._watch = watch
        self._rows = rows
        self._histories = [History() for _ in range(num_engines)]
        self.last: list[Sample] = []

    def look(self, hint: str = "") -> Group:
        """Ask, and return a new frame."""
        self.last = self._watch.sample()
        engines = [
            (sample, history.add(sample), history.gigabytes)
            for sample, history in zip(self.last, self._histories, strict=True)
        ]
        return frame(engines, rows=self._rows, hint=hint)


def _run(screen: _Screen, console: Console, interval: float) -> None:
    hint = f"every {interval:g} s; q leaves"
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                live.update(screen.look(hint), refresh=True)
                if pressed(interval) in {"q", "Q"}:
                    return
        except KeyboardInterrupt:
            return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key, for so many seconds; it returns the key, or nothing."""
    if not sys.stdin.isatty():
        yield _waited
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(timeout_s: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") if ready else ""


def _waited(timeout_s: float) -> str:
    time.sleep(timeout_s)
    return ""


def _print_json(samples: Sequence[Sample]) -> None:
    engines = [
        {"target": sample.target, "front_desk": sample.desk, "ranks": sample.ranks, "errors": sample.errors}
        for sample in samples
    ]
    text = msgspec.json.encode({"schema": 1, "engines": _named(engines)})
    typer.echo(msgspec.json.format(text, indent=1).decode())
    _leave_with_errors(samples)


def _named(value: object) -> object:
    """Return structs as mappings by field name, at any depth: on the wire some are plain arrays."""
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: _named(item) for name, item in value.items()}
    return [_named(item) for item in value] if isinstance(value, list | tuple) else value


def _leave_with_errors(samples: Sequence[Sample]) -> None:
    errors = [error for sample in samples for error in sample.errors]
    for error in errors:
        typer.echo(f"error: {error}", err=True)
    if errors:
        raise typer.Exit(BAD_INPUT)
