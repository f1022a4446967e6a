"""What ``kvplan demo`` does. How it looks stands in `demo_screen`.

1. Write a tiny seeded model.
2. Start three vLLM engines: one by itself, a prefill engine, and a decode engine of another geometry.
3. Ask the first for prompts and their answers; stop it.
4. Send the prompts through a router to the other two, and read off decode's metrics what moved.
5. Stop everything, whatever happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvplan.cli.demo_screen import Row, Screen
from kvplan.engines import (
    KVPLAN,
    NIXL,
    EngineOptions,
    Fleet,
    SteadyPrompt,
    build_model_apart,
    complete,
    external_tokens,
    read_metrics,
    steady_prompt,
    terminate_as_exit,
    total,
)
from kvplan.errors import EngineError
from kvplan.proxy import build_app, serve_in_thread
from kvplan.session.declared import METRICS

LENGTHS = (5, 33, 64, 100, 129, 300, 500, 1000)
"""Prompt lengths at and beside block boundaries, taken in turn."""

CONNECTORS = {"kvplan": KVPLAN, "nixl": NIXL}

MOVED = {
    "kvplan": (
        METRICS["received_bytes"].prometheus,
        METRICS["descriptors"].prometheus,
        METRICS["read_seconds"].prometheus + "_sum",
    ),
    "nixl": (
        "vllm:nixl_bytes_transferred_sum",
        "vllm:nixl_num_descriptors_sum",
        "vllm:nixl_xfer_time_seconds_sum",
    ),
}
"""By connector: decode's metrics of bytes, descriptors and seconds."""

METRICS_PATIENCE_S = 3.0
"""A decode engine reports with its next step; this long we wait for it."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a demo shall show; pairs are prefill, decode."""

    model: str
    tp: tuple[int, int]
    block_size: tuple[int, int]
    num_prompts: int
    num_tokens: int
    connector: str
    seed: int
    keep: bool


def run(options: DemoOptions, screen: Screen) -> list[Row]:
    """Runs the demo and returns one row per prompt. No process is left when it returns or raises."""
    with terminate_as_exit(), Fleet(keep=options.keep, on_progress=screen.progress) as fleet:
        if options.keep:
            screen.say(f"logs and model stay in {fleet.folder}")
        with screen.waiting("writing a tiny model with seeded random weights"):
            model = build_model_apart(options.model, fleet.folder)
        with screen.starting():
            alone, prefill, decode = fleet.start(*_engines(options, model))
        with screen.waiting("asking the single engine for prompts and its answers"):
            expected = list(_expected(alone.url, options))
        with screen.waiting("stopping the single engine"):
            fleet.stop([alone])
        screen.header(options.tp, options.block_size, options.connector)
        router = build_app([prefill.url], [decode.url])
        with serve_in_thread(router, host=decode.ports.host, port=0) as url:
            rows = [_send(one, url, decode.url, options.connector, screen) for one in expected]
        with screen.waiting("stopping prefill and decode"):
            fleet.close()
        return rows


def _engines(options: DemoOptions, model: Path) -> tuple[EngineOptions, ...]:
    connector = CONNECTORS[options.connector]
    (prefill_tp, decode_tp), (prefill_block, decode_block) = options.tp, options.block_size
    return (
        EngineOptions("single", model, block_size=decode_block, num_blocks=512),
        EngineOptions("prefill", model, prefill_tp, prefill_block, connector=connector, num_blocks=512),
        EngineOptions("decode", model, decode_tp, decode_block, connector=connector, num_blocks=512),
    )


def _expected(url: str, options: DemoOptions) -> Iterator[SteadyPrompt]:
    for number in range(options.num_prompts):
        length = LENGTHS[number % len(LENGTHS)]
        yield steady_prompt(url, length, num_tokens=options.num_tokens, seed=options.seed * 1000 + number)


def _send(expected: SteadyPrompt, router_url: str, decode_url: str, connector: str, screen: Screen) -> Row:
    before = read_metrics(decode_url)
    begin = time.monotonic()
    try:
        answer = complete(router_url, list(expected.prompt), num_tokens=len(expected.token_ids))
    except EngineError as error:
        row = Row(len(expected.prompt), failure=str(error))
    else:
        elapsed_s = time.monotonic() - begin
        external, moved = _what_moved(before, decode_url, connector)
        row = Row(
            num_prompt_tokens=len(expected.prompt),
            same=answer.token_ids == expected.token_ids,
            num_external_tokens=external,
            num_bytes=int(moved[0]),
            num_descriptors=int(moved[1]),
            read_s=moved[2],
            elapsed_s=elapsed_s,
        )
    screen.row(row)
    return row


def _what_moved(before: Mapping[str, float], decode_url: str, connector: str) -> tuple[int, tuple[float, ...]]:
    """Prompt tokens that came from the other engine; bytes, descriptors and seconds of the read."""
    deadline = time.monotonic() + METRICS_PATIENCE_S
    while True:
        after = read_metrics(decode_url)
        moved = tuple(total(after, name) - total(before, name) for name in MOVED[connector])
        if moved[0] or time.monotonic() > deadline:
            return external_tokens(after) - external_tokens(before), moved
        time.sleep(0.1)
