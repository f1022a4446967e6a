"""Seeded prompts as token ids, and the request bodies that send them. No HTTP here.

Prompts are random token ids: they share no prefix, so that a prefix cache can never answer for a transfer.
"""

from __future__ import annotations

import random
from typing import Any

__all__ = ["FIRST_ORDINARY_TOKEN", "SERVED_NAME", "completion_body", "make_prompt", "prompt_text"]

FIRST_ORDINARY_TOKEN = 5
"""Ids below are the special tokens of the tiny models' tokenizer (unknown, end, begin, padding)."""

SERVED_NAME = "tiny"
"""Under this name every engine of this room serves its model."""


def make_prompt(num_tokens: int, *, seed: int = 0, vocab_size: int = 512) -> list[int]:
    """Random ordinary token ids: the same for the same arguments, on every machine.

    >>> make_prompt(3, seed=1) == make_prompt(3, seed=1)
    True
    >>> make_prompt(3, seed=1)[0] == make_prompt(4, seed=1)[0] == make_prompt(3, seed=2)[0]
    False
    """
    source = random.Random(f"kvplan {seed} {num_tokens}")  # noqa: S311 - repeatable, not secret
    return [source.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(num_tokens)]


def prompt_text(token_ids: list[int]) -> str:
    """The text that the tiny models' tokenizer turns into exactly these ids.

    >>> prompt_text([7, 300])
    't7 t300'
    """
    return " ".join(f"t{token}" for token in token_ids)


def completion_body(prompt: list[int], *, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a greedy `/v1/completions` request for exactly `num_tokens` new tokens, with their ids.

    `fields` are added or replace what stands there, `kv_transfer_params` for example.
    """
    body: dict[str, Any] = {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body | fields
