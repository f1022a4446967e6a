"""``kvplan plan``: what one request moves, for machines. Reading, planning and the JSON form are elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import typer

from kvplan.cli.engine_file import load_pair
from kvplan.cli.exits import exits
from kvplan.cli.live import key_option
from kvplan.cli.pairs import bound_pairs, proved_plan
from kvplan.cli.plan_json import plan_json
from kvplan.cli.request_file import read_request, short_tables
from kvplan.errors import BindError, DescriptionError

if TYPE_CHECKING:
    from kvplan.cli.request_file import Request
    from kvplan.planner import Descriptors, EnginePlan


def add_to(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("plan")(plan)


def _bound(found: EnginePlan, wanted: Request, file: str) -> list[tuple[int, int, Descriptors]]:
    try:
        return bound_pairs(found, wanted, require_cover=True)
    except BindError as error:
        lacking = error
    try:
        bound = bound_pairs(found, wanted, require_cover=False)
    except BindError as error:
        raise DescriptionError(f"{file}: groups: {error}", field="groups", file=file) from None
    typer.echo(f"warning: {lacking}; what the source lacks is not moved", err=True)
    return bound


def plan(
    source: str = typer.Argument(help="The engine that has the cache (prefill): a description, or tcp://host:port."),
    destination: str = typer.Argument(help="The engine that needs it (decode): a description, or tcp://host:port."),
    *,
    request: str = typer.Option(..., "--request", help="Block ids of one request (JSON)."),
    as_json: bool = typer.Option(False, "--json", help="Print layouts, copies and readers as JSON, schema 1."),
    key: str = key_option(),
) -> None:
    """Show every copy that one request needs.

    Exit status: 0 planned, 1 the engines cannot exchange cache, 2 bad input.
    """
    with exits():
        ours, theirs = load_pair(source, destination, key=key)
        found = proved_plan(ours, theirs)
        wanted = read_request(request, ours, theirs)
        bound = _bound(found, wanted, request)
        for sentence in short_tables(wanted, theirs):
            typer.echo(f"warning: {sentence}", err=True)
        if as_json:
            text = msgspec.json.encode(plan_json(ours.layout, theirs.layout, bound))
            typer.echo(msgspec.json.format(text, indent=1).decode() if len(text) < 1 << 16 else text.decode())
            return
        for source_rank, destination_rank, moved in bound:
            typer.echo(
                f"rank {source_rank} -> rank {destination_rank}: {moved.total_bytes} bytes in {len(moved)} descriptors"
            )
