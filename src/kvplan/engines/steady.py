"""Choosing prompts whose greedy answer rounding cannot change. Asks an engine; judges no transfer.

Two engines that hold the same cache, but split their sums differently (TP 1 and TP 2, another batch), differ in the
last bits of their logits. Where the two best tokens of a step are closer than that, either is right, and a comparison
of tokens says nothing. So:
1. ask the reference engine for several candidate prompts at once, with the log-probabilities of the two best tokens,
2. keep the first whose smallest gap over all steps is at least `margin`, and whose answer is no mere repetition,
3. ask again for that one alone: this is the reference answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice

from kvplan.engines.client import Answer, complete
from kvplan.engines.prompts import make_prompt
from kvplan.errors import EngineError

__all__ = ["MARGIN", "SteadyPrompt", "steady_prompt", "steady_prompts"]

MARGIN = 0.09
"""In nats. Between TP 1 and TP 2 a gap of the tiny models (bf16) changes by up to 0.08, by 0.05 once in a hundred."""

_CANDIDATES_AT_ONCE = 16
_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class SteadyPrompt:
    """A prompt and the one right greedy answer to it."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    gap: float
    """The smallest distance of the two best tokens over the answer, in nats."""


def steady_prompts(
    url: str, lengths: Iterator[int] | tuple[int, ...], *, num_tokens: int, seed: int = 0
) -> Iterator[SteadyPrompt]:
    """One steady prompt for each length, found on the reference engine at `url`."""
    for length in lengths:
        yield steady_prompt(url, length, num_tokens=num_tokens, seed=seed)


def steady_prompt(url: str, length: int, *, num_tokens: int, seed: int = 0, margin: float = MARGIN) -> SteadyPrompt:
    """The first steady prompt of this length; EngineError when hundreds of candidates bring none."""
    seeds = count(seed * 1_000_000)
    with ThreadPoolExecutor(_CANDIDATES_AT_ONCE) as pool:
        for _ in range(_ROUNDS):
            prompts = [make_prompt(length, seed=one) for one in islice(seeds, _CANDIDATES_AT_ONCE)]
            answers = pool.map(lambda prompt: _ask(url, prompt, num_tokens), prompts)
            for prompt, first in zip(prompts, list(answers), strict=True):
                if not _is_steady(first, margin):
                    continue
                alone = _ask(url, prompt, num_tokens)
                if _is_steady(alone, margin):
                    return SteadyPrompt(tuple(prompt), alone.token_ids, alone.smallest_gap)
    raise EngineError(f"{url}: no steady prompt of {length} tokens in {_ROUNDS * _CANDIDATES_AT_ONCE} candidates")


def _ask(url: str, prompt: list[int], num_tokens: int) -> Answer:
    return complete(url, prompt, num_tokens=num_tokens, logprobs=2)


def _is_steady(answer: Answer, margin: float) -> bool:
    return answer.smallest_gap >= margin and 2 * len(set(answer.token_ids)) >= len(answer.token_ids)
