"""``kvplan proxy``: runs the router of `kvplan.proxy` from the command line. It routes nothing itself."""

from __future__ import annotations

import importlib.util

import typer

from kvplan.cli.exits import exits
from kvplan.errors import DescriptionError


def add_to(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("proxy")(proxy)


def proxy(
    *,
    prefill: list[str] = typer.Option(..., "--prefill", help="Base URL of a prefill engine; give it for each."),
    decode: list[str] = typer.Option(..., "--decode", help="Base URL of a decode engine; give it for each."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8000, min=1, max=65535, help="Port to listen on."),
) -> None:
    """Serve an OpenAI API in front of prefill and decode engines, taken in turn.

    Completions and chat completions pass through one engine of each role; answers are streamed; when a client leaves,
    both sides stop. Ends on SIGINT and SIGTERM.
    """
    with exits():
        missing = [name for name in ("httpx", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]
        if missing:
            raise DescriptionError(f"the router needs {', '.join(missing)}: install kvplan[proxy]")
        from kvplan.proxy import build_app, serve

        serve(build_app(prefill, decode), host=host, port=port)
