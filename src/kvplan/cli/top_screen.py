"""The frames of ``kvplan top``: samples in, rich renderables out. Asks nobody, computes nothing beyond sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvplan.cli.summary_table import duration, size
from kvplan.cli.top_model import merged_failures, merged_leases, merged_peers, merged_reads, quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from kvplan.cli.top_model import Rates, Sample
    from kvplan.wire.status import Status

STATE_STYLES = {
    "ready": "green", "asking": "yellow", "suspect": "yellow", "refused": "red", "gone": "red",
    "waiting": "yellow", "reading": "cyan", "draining": "red",
    "open": "yellow", "claimed": "cyan", "closing": "magenta",
}  # fmt: skip
SENTENCES = ("detail", "why")
"""Columns that wrap; the others keep their width."""
BARS = " ▁▂▃▄▅▆▇█"


class _Flow:
    """Texts one after the other, each whole; a new line where the next one does not fit."""

    def __init__(self, texts: Sequence[Text], *, indent: int = 2, gap: int = 3) -> None:
        self._texts = texts
        self._indent = indent
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text(" " * self._indent, style="default")
        for text in self._texts:
            if line.cell_len + text.cell_len > options.max_width:
                yield line
                line = Text(" " * self._indent, style="default")
            line.append_text(text).append(" " * self._gap, style=text.style)
        yield line


def frame(engines: Sequence[tuple[Sample, Rates, Sequence[float]]], *, rows: int, hint: str = "") -> Group:
    """Return one frame: every engine with its rates and its history of GB/s."""
    parts: list[RenderableType] = []
    for sample, rates, history in engines:
        parts += [*_engine(sample, rates, history, rows), Text()]
    return Group(*parts, Text(hint, style="dim")) if hint else Group(*parts[:-1])


def sparkline(values: Sequence[float]) -> str:
    """Return values as bars, the highest being full.

    >>> sparkline([0, 1, 2, 4])
    ' ▂▄█'
    """
    top = max(values, default=0)
    return "".join(BARS[round(value / top * (len(BARS) - 1))] if top else BARS[0] for value in values)


def bar(share: float, width: int = 12) -> str:
    """Return how much of something is there.

    >>> bar(0.5, width=4)
    '██░░  50 %'
    """
    full = int(share * width)
    return f"{'█' * full}{'░' * (width - full)} {share * 100:3.0f} %"


def speed(gigabytes: float) -> str:
    """Return bytes a second.

    >>> speed(12.34), speed(0.0021)
    ('12.34 GB/s', '2.10 MB/s')
    """
    return f"{gigabytes:.2f} GB/s" if gigabytes >= 0.1 or not gigabytes else f"{gigabytes * 1e3:.2f} MB/s"


def uptime(seconds: float) -> str:
    """Return a time span in its two largest units.

    >>> uptime(59), uptime(3725), uptime(190000)
    ('59 s', '1 h 2 m', '2 d 4 h')
    """
    units = [("d", 86400), ("h", 3600), ("m", 60), ("s", 1)]
    parts: list[str] = []
    left = int(seconds)
    for name, length in units:
        if left >= length or parts:
            parts.append(f"{left // length} {name}")
            left %= length
    return " ".join(parts[:2]) or "0 s"


def _engine(sample: Sample, rates: Rates, history: Sequence[float], rows: int) -> list[RenderableType]:
    errors = [Text(f"  {error}", style="red") for error in sample.errors]
    if sample.desk is None:
        return [Text(sample.target, style="bold red"), *errors]
    tables = [_ranks(sample), *(draw(sample, rows) for draw in (_peers, _reads, _leases, _failures))]
    head = [_title(sample, sample.desk), *errors, _numbers(sample, rates, history)]
    return [*head, *(table for table in tables if table is not None)]


def _title(sample: Sample, desk: Status) -> Text:
    model = desk.facts.get("info.model", "")
    facts = [sample.target, f"kvplan {desk.version}", f"up {uptime(desk.uptime_s)}", *([model] if model else [])]
    return Text.assemble((desk.engine_id, "bold"), "  ", ("  ".join(facts), "dim"))


def _numbers(sample: Sample, rates: Rates, history: Sequence[float]) -> RenderableType:
    """Return the line of numbers; what does not fit goes to a second line, number by number."""
    values = sample.values
    parts = [
        (speed(rates.gigabytes), "bold cyan"), (f"{rates.reads:.1f} reads/s", ""),
        (f"{int(values['transfers_in_flight'])} transfers in flight", ""),
        (f"{sample.requests('live_offers'):,} leases", ""),
        (f"{sample.requests('reads_received'):,} received", "green"),
        (f"{sample.requests('reads_failed'):,} failed", "bold red" if values["reads_failed"] else "dim"),
        (f"{sample.requests('expiries'):,} expired", "red" if values["expiries"] else "dim"),
    ]  # fmt: skip
    middle, slow = (quantile(values, "read_seconds", share) for share in (0.5, 0.99))
    if middle is not None and slow is not None:
        parts.append((f"p50 <= {duration(middle)}, p99 <= {duration(slow)}", ""))
    if len(history) > 1:
        parts.append((sparkline(history), "cyan"))
    return _Flow([Text(words, style=style) for words, style in parts])


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold blue", box=box.SIMPLE_HEAD, show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name not in SENTENCES)
    return table


def _ranks(sample: Sample) -> Table:
    numbers = ("bytes in", "reads", "failed", "in flight", "leases", "refused", "parked", "staging", "errors")
    table = _table("Ranks", "rank", "process", "up", "transport", *numbers, right=numbers)
    for status in sample.ranks:
        get = status.values.get
        errors = get("loop_errors", 0) + get("overloads", 0) + get("malformed_messages", 0)
        table.add_row(
            str(status.rank), Text(f"{status.host}:{status.pid}"), uptime(status.uptime_s), Text(status.transport),
            size(get("transferred_bytes", 0)), f"{get('reads_received', 0):,.0f}",
            f"{get('reads_failed', 0):,.0f}", f"{get('transfers_in_flight', 0):,.0f}", f"{get('live_offers', 0):,.0f}",
            f"{get('claims_refused', 0):,.0f}", f"{get('parked_messages', 0):,.0f}", size(get("staging_bytes", 0)),
            Text(f"{errors:,.0f}", style="red" if errors else ""),
        )  # fmt: skip
    return table


def _peers(sample: Sample, rows: int) -> Table | None:
    peers = merged_peers(sample.ranks)
    if not peers:
        return None
    numbers = ("reading", "received", "failed", "bytes")
    why = ("why",) if any(peer.detail for peer in peers[:rows]) else ()
    table = _table(_counted("Peers", len(peers), rows), "engine", "front desk", "state", *numbers, *why, right=numbers)
    for peer in peers[:rows]:
        table.add_row(
            Text(short(peer.engine_id)), Text(peer.address), _state(peer.state), f"{peer.num_reads:,}",
            f"{peer.reads_received:,}", f"{peer.reads_failed:,}", size(peer.received_bytes),
            *([Text(peer.detail)] if why else []),
        )  # fmt: skip
    return table


def _reads(sample: Sample, rows: int) -> Table | None:
    reads = merged_reads(sample.ranks)
    if not reads:
        return None
    title = _counted("Transfers in flight", len(reads), rows)
    table = _table(title, "request", "from", "state", "waits for", "ranks", "age", "bytes", "", right=("age", "bytes"))
    for read in reads[:rows]:
        table.add_row(
            Text(read.request_id), Text(short(read.engine_id)), _state(read.state), Text(read.waits_for),
            str(read.num_ranks), duration(read.age_s), size(read.num_bytes) if read.num_bytes else "",
            Text(bar(read.arrived_bytes / read.num_bytes) if read.num_bytes else "", style="cyan"),
        )  # fmt: skip
    return table


def _leases(sample: Sample, rows: int) -> Table | None:
    leases = merged_leases(sample.ranks)
    if not leases:
        return None
    title = _counted("Leases", len(leases), rows)
    table = _table(title, "request", "state", "reader", "ranks", "left", right=("left",))
    for lease in leases[:rows]:
        reader = Text(short(lease.reader) or "nobody yet", style="" if lease.reader else "dim")
        table.add_row(Text(lease.request_id), _state(lease.state), reader, str(lease.num_ranks), duration(lease.left_s))
    return table


def _failures(sample: Sample, rows: int) -> Table | None:
    failures = merged_failures(sample.ranks)
    if not failures:
        return None
    title = _counted("Latest failures", len(failures), rows)
    table = _table(title, "ago", "request", "from", "reason", "detail", right=("ago",))
    for line, _ in failures[:rows]:
        table.add_row(
            duration(line.age_s) if line.age_s < 60 else uptime(line.age_s), Text(line.request_id),
            Text(short(line.engine_id)), Text(line.reason, style="red"), Text(line.detail),
        )  # fmt: skip
    return table


def short(name: str) -> str:
    """Return a long name, as engine ids are, by its beginning and its end.

    >>> short("eed8a751-b6b5-44b3-bbaf-be274e08d1fc.1795978144612862391"), short("decode-0.c01d")
    ('eed8a751…862391', 'decode-0.c01d')
    """
    return name if len(name) <= 24 else f"{name[:8]}…{name[-6:]}"


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def _counted(title: str, count: int, rows: int) -> str:
    return f"{title} ({count})" if count <= rows else f"{title} ({rows} of {count})"
