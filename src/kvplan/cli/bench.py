"""``kvplan bench``: what moving bytes costs here, by run size; writes the calibration file. Timing is elsewhere.

Without a target, two processes on this machine are measured. With one, this process reads from a live engine's cache,
which changes nothing there: run it on the host that will read, to measure the very link. With two, it also reads what a
request between them would.
"""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvplan.cli.bench_endpoints import fresh_endpoints, live_endpoint
from kvplan.cli.bench_measure import longest_run, measured, measured_scatter, settings
from kvplan.cli.bench_replay import replay, replayable
from kvplan.cli.bench_tables import cost_table, replay_table, sentences
from kvplan.cli.calibration import Calibration, Cost, Machine, fit, write_calibration
from kvplan.cli.engine_file import Target, load_pair
from kvplan.cli.exits import exits
from kvplan.cli.live import ask_engine, is_live, key_option
from kvplan.errors import DescriptionError
from kvplan.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.cli.bench_measure import Endpoint
    from kvplan.cli.bench_replay import Replay

SIZES = "256,1K,4K,16K,64K,256K,1M"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
PIPE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Effort:
    """What is measured, and how long."""

    run_sizes: tuple[int, ...]
    num_bytes: int
    rounds: int


def add_to(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("bench")(bench)


def bench(
    source: str = typer.Argument("", help="A live engine to read from, as tcp://host:port; else two processes here."),
    destination: str = typer.Argument("", help="An engine that would read: replay a request between the two."),
    *,
    transport: list[str] = typer.Option([], "--transport", help="What to measure here (default: nixl and cma)."),
    run_sizes: str = typer.Option(SIZES, "--run-sizes", help="Lengths of runs, with K or M."),
    mib: int = typer.Option(32, "--mib", min=1, max=4096, help="MiB per measurement."),
    rounds: int = typer.Option(5, "--rounds", min=1, max=1000, help="Measurements of each; the median counts."),
    tokens: int = typer.Option(1000, "--tokens", min=1, help="Length of the request that is replayed."),
    output: Optional[Path] = typer.Option(None, "--output", "-o", help="Write the calibration file there."),  # noqa: UP045
    key: str = key_option(),
) -> None:
    """Measure bandwidth and what each descriptor costs, by run size.

    Exit status: 0 measured, 1 the engines cannot exchange cache, 2 it could not be measured.
    """
    with exits(), ExitStack() as stack:
        effort = Effort(_sizes(run_sizes), mib << 20, rounds)
        _check(source, transport, output)
        pair = load_pair(source, destination, key=key) if destination else None
        request = replayable(*pair, tokens) if pair else None
        engine = ask_engine(source, key=key) if source else None
        ends = fresh_endpoints(transport, 2 * max(effort.num_bytes, *effort.run_sizes), stack) if engine is None else {}
        if engine is not None:
            ends = live_endpoint(source, engine, stack)
        replays: list[Replay] = []
        with _progress() as progress:
            calibration = _calibrate(ends, effort, progress)
            if pair is not None and engine is not None and request is not None:
                [end] = ends.values()
                tick = _ticker(progress, "request", len(pair[1].layout.ranks) * (rounds + 1))
                replays = replay(*pair, engine.hello, end, calibration, request=request, rounds=rounds, tick=tick)
        _show(calibration, replays, pair, tokens)
        if output is not None:
            write_calibration(output, calibration)
            typer.echo(f"calibration: {output}")


def _check(source: str, transports: list[str], output: Path | None) -> None:
    """Refuse what would fail only after the measurement."""
    if source and not is_live(source):
        raise DescriptionError(f"{source}: only a live engine can be measured; write tcp://host:port")
    if source and transports:
        raise DescriptionError("--transport is for two processes here; a live engine has the transport that it has")
    if output is not None and not output.absolute().parent.is_dir():
        raise DescriptionError(f"{output} cannot be written: {output.absolute().parent} is no folder")


def _sizes(text: str) -> tuple[int, ...]:
    """Return run sizes in bytes, ascending."""
    found = []
    for word in filter(None, (part.strip().upper().removesuffix("IB").removesuffix("B") for part in text.split(","))):
        unit = word[-1] if word[-1] in UNITS else ""
        number = word.removesuffix(unit) if unit else word
        if not (number.isascii() and number.isdigit() and 8 <= int(number) * UNITS[unit] <= 1 << 30):
            raise DescriptionError(f"--run-sizes: {word!r} is no size in [8, 1G]; write for example 256,4K,1M")
        found.append(int(number) * UNITS[unit])
    if not found:
        raise DescriptionError("--run-sizes names no size")
    return tuple(sorted(set(found)))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def _calibrate(ends: dict[str, Endpoint], effort: Effort, progress: Progress) -> Calibration:
    costs = {name: _measure_end(name, end, effort, progress) for name, end in ends.items()}
    scatter = _measure_scatter(effort, progress)
    machine = Machine(
        host=platform.node(), platform=platform.platform(), cores=os.cpu_count() or 0, python=platform.python_version()
    )
    made_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Calibration(made_at=made_at, kvplan=__version__, machine=machine, transports=costs, scatter=scatter)


def _measure_end(name: str, end: Endpoint, effort: Effort, progress: Progress) -> Cost:
    longest = longest_run(end.ranges)
    fitting = [run for run in effort.run_sizes if run <= longest]
    if not fitting:
        raise DescriptionError(f"the engine's longest region has {longest} bytes; no --run-sizes fits")
    todo = settings(fitting, effort.num_bytes)
    local = end.buffer(2 * max(item.run_bytes * item.num_runs for item in todo))
    tick = _ticker(progress, name, len(todo) * (effort.rounds + 1))
    return fit([measured(end, local, setting, effort.rounds, tick) for setting in todo], end.origin)


def _measure_scatter(effort: Effort, progress: Progress) -> Cost:
    todo = settings(effort.run_sizes, effort.num_bytes)
    tick = _ticker(progress, "scatter", len(todo) * (effort.rounds + 1))
    return fit([measured_scatter(setting, effort.rounds, tick) for setting in todo], "copies inside this process")


def _ticker(progress: Progress, name: str, total: int) -> Callable[[], None]:
    task = progress.add_task(name, total=total)
    return lambda: progress.advance(task)


def _show(calibration: Calibration, replays: list[Replay], pair: tuple[Target, Target] | None, tokens: int) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    for name, cost in calibration.transports.items():
        console.print(cost_table(name, cost))
    if calibration.scatter is not None:
        console.print(cost_table("scatter", calibration.scatter))
    if pair is not None:
        console.print(replay_table(replays, pair[0].name, pair[1].name, tokens))
    for line in sentences(calibration):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
