"""The ``kvplan`` command: one typer app, commands in files of their own. No command's work is done here."""

from __future__ import annotations

import sys

import typer

from kvplan.cli import bench, check, demo, explain, plan, proxy, top
from kvplan.version import __version__

app = typer.Typer(
    name="kvplan",
    help="Plans and moves KV cache between LLM inference engines of different geometry.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
plan.add_to(app)
explain.add_to(app)
check.add_to(app)
demo.add_to(app)
proxy.add_to(app)
top.add_to(app)
bench.add_to(app)


@app.callback(invoke_without_command=True)
def _version(
    *,
    version: bool = typer.Option(False, "--version", help="Print the version and leave.", is_eager=True),
) -> None:
    if version:
        typer.echo(f"kvplan {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command that the process was started with."""
    try:
        app()
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None
