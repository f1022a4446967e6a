"""``kvplan explain``: who sends what to whom, and at what cost, as text and as a picture. Costs are in ``flows.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer
from rich.console import Console

from kvplan.cli.calibration import measured_transport
from kvplan.cli.engine_file import load_pair
from kvplan.cli.exits import BAD_INPUT, exits
from kvplan.cli.flows import Cost, flows
from kvplan.cli.hints import hints
from kvplan.cli.live import key_option
from kvplan.cli.pairs import proved_plan
from kvplan.cli.picture import draw, page
from kvplan.cli.sample import roomy, sample_request
from kvplan.cli.summary_table import closing_lines, group_table, pair_table
from kvplan.transport.cost import cost_model

MAX_TOKENS = 10_000_000
PIPE_WIDTH = 170
"""Columns when the output is no terminal."""


def add_to(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("explain")(explain)


def explain(
    source: str = typer.Argument(help="The engine that has the cache (prefill): a description, or tcp://host:port."),
    destination: str = typer.Argument(help="The engine that needs it (decode): a description, or tcp://host:port."),
    *,
    tokens: int = typer.Option(1000, "--tokens", min=1, max=MAX_TOKENS, help="Length of the sample request."),
    bandwidth: float = typer.Option(25.0, "--bandwidth", min=0.001, help="GB/s of one rank's link."),
    descriptor_cost: float = typer.Option(3.0, "--descriptor-cost", min=0.0, help="Microseconds a descriptor adds."),
    calibration: Optional[Path] = typer.Option(None, "--calibration", help="Costs that kvplan bench has measured."),  # noqa: UP045
    picture: Optional[Path] = typer.Option(None, "--picture", help="Also draw it: a path ending in .svg or .html."),  # noqa: UP045
    key: str = key_option(),
) -> None:
    """Show who sends what to whom, what it costs, and why.

    Exit status: 0 shown, 1 the engines cannot exchange cache, 2 bad input.
    """
    if picture is not None and picture.suffix.lower() not in {".svg", ".html"}:
        typer.echo(f"error: --picture {picture}: the name must end in .svg or .html", err=True)
        raise typer.Exit(BAD_INPUT)
    with exits():
        ours, theirs = (roomy(target, tokens) for target in load_pair(source, destination, key=key))
        plan = proved_plan(ours, theirs)
        cost = Cost(bandwidth, descriptor_cost)
        if calibration is not None:
            transport = theirs.facts.get("transport", "") or measured_transport(calibration)
            cost = Cost.measured(cost_model(transport, file=str(calibration)))
        found = flows(plan, sample_request(ours, theirs, tokens), cost)
        console = Console(soft_wrap=False)
        if not console.is_terminal:
            console = Console(width=PIPE_WIDTH)
        console.print(pair_table(found, plan, cost))
        console.print(group_table(found))
        for line in (*closing_lines(found, plan, cost, tokens), *hints(ours, theirs, found)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if picture is not None:
            drawn = draw(ours, theirs, plan, found, cost, tokens)
            text = page(drawn, found, plan, cost, tokens) if picture.suffix.lower() == ".html" else drawn
            try:
                picture.write_text(text, encoding="utf-8")
            except OSError as error:
                typer.echo(f"error: {picture} cannot be written: {error.strerror}", err=True)
                raise typer.Exit(BAD_INPUT) from None
            console.print(f"picture: {picture}", highlight=False, markup=False, soft_wrap=True)
