"""The tables of ``kvplan bench``: measurements in, rich renderables out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from kvplan.cli.summary_table import duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvplan.cli.bench_replay import Replay
    from kvplan.cli.calibration import Calibration, Cost


def cost_table(name: str, cost: Cost) -> Table:
    """Return what each batch took, beside what the fitted model says of it."""
    table = _table(f"{name}: {cost.origin}", "run", "runs", "time", "GB/s", "per run", "model says")
    for sample in cost.samples:
        total = sample.run_bytes * sample.num_runs
        table.add_row(
            size(sample.run_bytes),
            f"{sample.num_runs:,}",
            duration(sample.seconds),
            _speed(total, sample.seconds),
            f"{sample.seconds / sample.num_runs * 1e6:,.2f} us",
            duration(cost.seconds(total, sample.num_runs)),
        )
    return table


def replay_table(replays: Sequence[Replay], source: str, destination: str, tokens: int) -> Table:
    """Return what each rank's reads of one request took, one rank at a time, beside what the model says."""
    title = f"a request of {tokens:,} tokens from {source} to {destination}, one rank at a time"
    table = _table(title, "to", "from", "bytes", "descriptors", "path", "time", "GB/s", "model says")
    for one in replays:
        table.add_row(
            f"D{one.destination_rank}",
            ", ".join(f"P{rank}" for rank in one.source_ranks),
            size(one.num_bytes),
            f"{one.num_descriptors:,}",
            "staged" if one.staged else "direct",
            duration(one.seconds),
            _speed(one.num_bytes, one.seconds),
            duration(one.predicted_s),
        )
    return table


def sentences(calibration: Calibration) -> Iterator[str]:
    """Yield the fitted constants in words."""
    for name, cost in calibration.transports.items():
        yield f"{name}: {_words(cost, 'descriptor')}"
    if calibration.scatter is not None:
        yield f"scatter: {_words(calibration.scatter, 'run')}"


def _words(cost: Cost, what: str) -> str:
    each = f"{cost.descriptor_s * 1e6:,.2f} us a {what}, {duration(cost.post_s)} a batch"
    return f"{cost.bytes_per_s / 1e9:,.2f} GB/s, {each}"


def _speed(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:,.2f}" if seconds > 0 else ""


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table
