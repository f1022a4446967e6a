"""``kvplan check``: can these two engines exchange cache? Every field that stops them is named."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvplan.cli.engine_file import Target, load_pair
from kvplan.cli.exits import CANNOT, exits
from kvplan.cli.live import key_option
from kvplan.cli.pairs import mismatches
from kvplan.errors import Mismatch, PlanError
from kvplan.planner import plan_engines
from kvplan.wire.compatibility import INFORMATION

PIPE_WIDTH = 140


def add_to(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("check")(check)


def check(
    source: str = typer.Argument(help="The engine that has the cache (prefill): a description, or tcp://host:port."),
    destination: str = typer.Argument(help="The engine that needs it (decode): a description, or tcp://host:port."),
    *,
    key: str = key_option(),
) -> None:
    """Say whether two engines can exchange cache; if not, which fields differ and what would work.

    Exit status: 0 they can, 1 they cannot, 2 bad input.
    """
    with exits():
        ours, theirs = load_pair(source, destination, key=key)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    stops = mismatches(ours, theirs)
    failure = "" if stops else _failure(ours, theirs)
    console.print(_allowed(ours, theirs))
    if not stops and not failure:
        console.print(
            f"yes: {theirs.name} can read the cache of {ours.name}", highlight=False, markup=False, soft_wrap=True
        )
        return
    console.print(
        f"no: {theirs.name} cannot read the cache of {ours.name}", highlight=False, markup=False, soft_wrap=True
    )
    for stop in stops:
        console.print(_stop(stop), highlight=False, markup=False, soft_wrap=True)
    if failure:
        console.print(f"  {failure}", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(CANNOT)


def _failure(ours: Target, theirs: Target) -> str:
    try:
        plan_engines(ours.layout, theirs.layout)
    except PlanError as error:
        return str(error)
    return ""


def _stop(stop: Mismatch) -> str:
    return f"  {stop.field}: source {stop.ours}, destination {stop.theirs}\n    what would work: {stop.advice}"


def _allowed(ours: Target, theirs: Target) -> Table:
    """Return the fields that may differ, with both values."""
    table = Table(title="What may differ", title_justify="left", header_style="bold")
    for name in ("field", ours.layout.engine_id, theirs.layout.engine_id):
        table.add_column(escape(name))
    for (field, a), (_, b) in zip(_facts(ours), _facts(theirs), strict=True):
        if a == b == "?":
            continue
        table.add_row(field, a, b, style=None if a == b else "bold")
    for field in sorted(name for name in {*ours.facts, *theirs.facts} if name.startswith(INFORMATION)):
        a, b = (escape(target.facts.get(field, "?")) for target in (ours, theirs))
        table.add_row(escape(field.removeprefix(INFORMATION)), a, b, style=None if a == b else "bold")
    return table


def _facts(target: Target) -> list[tuple[str, str]]:
    ranks = target.layout.ranks
    tokens = {item.group: item.block.tokens_per_block for rank in ranks for item in rank.components}
    blocks = {region.num_blocks for rank in ranks for region in rank.regions}
    facts = [
        ("ranks: tp x pp", f"{max(r.tp for r in ranks) + 1} x {max(r.pp for r in ranks) + 1}"),
        ("dcp", str(max(rank.dcp for rank in ranks) + 1)),
        (
            "tokens per block, by group",
            ", ".join("state" if tokens[g] is None else str(tokens[g]) for g in sorted(tokens)),
        ),
        ("blocks", ", ".join(map(str, sorted(blocks)))),
        ("regions per rank", ", ".join(map(str, sorted({len(rank.regions) for rank in ranks})))),
    ]
    cache = target.spec.cache if target.spec else None
    names = ("kernel_block_size", "kv_layout", "kv_packing", "conv_layout", "shared_regions")
    return facts + [(name, "?" if cache is None else _value(getattr(cache, name))) for name in names]


def _value(value: object) -> str:
    return {None: "as block", True: "yes", False: "no"}.get(value, str(value))  # type: ignore[call-overload,no-any-return]
