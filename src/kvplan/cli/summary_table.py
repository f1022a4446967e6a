"""The tables of ``kvplan explain``: flows in, rich renderables out. No arithmetic beyond sums.

Ranks are named P0, P1, ... at the source and D0, D1, ... at the destination, in rank order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from kvplan.cli.flows import predicted_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvplan.cli.flows import Cost, Flow, GroupShare, Ranges
    from kvplan.planner import EngineLayout, EnginePlan

AXIS_WORDS = {"kv_head": "KV heads", "state_head": "state heads", "channel": "channels"}


def pair_table(found: Sequence[Flow], plan: EnginePlan, cost: Cost) -> Table:
    """Return who sends what to whom, one row per pair of ranks."""
    table = Table(title="Who sends what to whom", title_justify="left", header_style="bold")
    for name in ("from", "to", "heads", "layers", "tokens"):
        table.add_column(name)
    for name in ("bytes", "descriptors", "smallest run", "median run", "path", "time"):
        table.add_column(name, justify="left" if name == "path" else "right")
    for flow in found:
        table.add_row(
            rank_name("P", flow.source_rank, plan.source),
            rank_name("D", flow.destination_rank, plan.destination),
            held_text(flow.held) or "all (one row a token)",
            f"{len(flow.layers)}",
            tokens_text(flow.shares),
            size(flow.num_bytes),
            f"{flow.num_descriptors:,}",
            f"{flow.smallest_run:,} B",
            f"{flow.median_run:,} B",
            f"staged, {flow.read_descriptors:,} reads" if flow.staged else "direct",
            duration(cost.seconds(flow.read_bytes, flow.read_descriptors)),
        )
    return table


def group_table(found: Sequence[Flow]) -> Table:
    """Return what moves in all, one row per KV cache group of the source."""
    table = Table(title="What moves", title_justify="left", header_style="bold")
    for name in ("group", "components", "layers", "tokens"):
        table.add_column(name)
    for name in ("bytes", "descriptors"):
        table.add_column(name, justify="right")
    for row in group_rows(found):
        table.add_row(*row.values())
    return table


def group_rows(found: Sequence[Flow]) -> list[dict[str, str]]:
    """Return the texts of one row per KV cache group of the source."""
    shares: dict[int, list[GroupShare]] = {}
    for flow in found:
        for share in flow.shares:
            shares.setdefault(share.group, []).append(share)
    return [
        {
            "group": str(group),
            "components": ", ".join(dict.fromkeys(name for share in own for name in share.components)),
            "layers": str(len({layer for share in own for layer in share.layers})),
            "tokens": "state" if own[0].tokens is None else f"{max(share.kept or 0 for share in own):,}",
            "bytes": size(sum(share.num_bytes for share in own)),
            "descriptors": f"{sum(share.num_descriptors for share in own):,}",
        }
        for group, own in sorted(shares.items())
    ]


def closing_lines(found: Sequence[Flow], plan: EnginePlan, cost: Cost, num_tokens: int) -> Iterable[str]:
    """Yield the sentences below the tables."""
    total, count = sum(flow.num_bytes for flow in found), sum(flow.num_descriptors for flow in found)
    per_thousand = count * 1000 / num_tokens
    yield f"{num_tokens:,} tokens: {size(total)} in {count:,} descriptors ({per_thousand:,.0f} per 1,000 tokens)"
    readers = [f"P{rank}: {len(who)}" for rank, who in enumerate(plan.readers)]
    yield f"readers per source rank: {', '.join(readers)}"
    unread = [f"P{rank}" for rank, who in enumerate(plan.readers) if not who]
    if unread:
        yield f"nobody reads {', '.join(unread)}: what they hold, others hold too; they are released at once"
    yield from dict.fromkeys(("staged: " if flow.staged else "direct: ") + flow.why for flow in found)
    seconds = predicted_seconds(found, cost)
    yield (
        f"predicted time: {duration(seconds)} at {cost.bandwidth_gbps:g} GB/s a rank and {cost.descriptor_us:g} us a "
        "descriptor (the slowest rank)"
    )
    layers = dict.fromkeys(layer for layer, _ in plan.not_moved)
    if layers:
        yield f"not moved, on one side only: {', '.join(layers)}"


def rank_name(letter: str, rank: int, engine: EngineLayout) -> str:
    """Return a rank's name and place, as ``P3 tp3`` or ``D5 pp1 tp1``."""
    own = engine.ranks[rank]
    stages = max(item.pp for item in engine.ranks)
    shares = max(item.dcp for item in engine.ranks)
    parts = [f"{letter}{rank}"]
    parts += [f"pp{own.pp}"] if stages else []
    parts += [f"tp{own.tp}"]
    parts += [f"dcp{own.dcp}"] if shares else []
    return " ".join(parts)


def held_text(held: Sequence[tuple[str, Ranges]]) -> str:
    """Return intervals of heads in words, ends included: ``KV heads 4-7, state heads 0-15``."""
    return ", ".join(f"{AXIS_WORDS.get(axis, axis)} {ranges_text(ranges)}" for axis, ranges in held)


def ranges_text(ranges: Ranges) -> str:
    """Return intervals as ``0-3, 8``, ends included."""
    return ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in ranges)


def tokens_text(shares: Sequence[GroupShare]) -> str:
    """Return the distinct numbers of tokens, and ``state`` where some move."""
    counts = dict.fromkeys(sorted({share.tokens for share in shares if share.tokens is not None}, reverse=True))
    words = [f"{count:,}" for count in counts]
    return ", ".join([*words, *(["state"] if any(share.tokens is None for share in shares) else [])])


def size(num_bytes: float) -> str:
    """Return bytes in the unit that reads best.

    >>> size(512), size(81920), size(327_680_000)
    ('512 B', '80.0 KiB', '312.5 MiB')
    """
    if num_bytes < 1024:
        return f"{num_bytes:,.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} TiB"


def duration(seconds: float) -> str:
    """Return a time in the unit that reads best.

    >>> duration(0.000012), duration(0.0123), duration(2.5)
    ('12 us', '12.3 ms', '2.50 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.0f} us"
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
