"""Engines that tests share: started when first asked for, stopped when others need their place. No tests here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from kvplan.engines import (
    KVPLAN,
    Connector,
    Engine,
    EngineOptions,
    Fleet,
    SteadyPrompt,
    build_model_apart,
    steady_prompts,
    total,
)
from kvplan.errors import EngineError
from kvplan.session.declared import METRICS

LENGTHS = (1, 5, 31, 32, 33, 64, 65, 100, 129, 300, 500)
NUM_TOKENS = 12

START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Geometry:
    """What distinguishes the engines of the tests. `copy` tells apart two of the same kind."""

    model: str = "llama"
    tp: int = 1
    block_size: int = 32
    dtype: str = "bfloat16"
    connector: Connector | None = KVPLAN
    copy: int = 0

    @property
    def name(self) -> str:
        connector = self.connector.name if self.connector else "alone"
        policy = (self.connector and self.connector.load_failure_policy) or ""
        return f"{self.model}-tp{self.tp}-b{self.block_size}-{self.dtype}-{connector}{policy}-{self.copy}".lower()


class EnginePool:
    """At most `max_alive` engines at a time, the longest unused stopped first.

    An engine that failed to start is not tried again: every test that needs it fails at once with the same message.
    """

    def __init__(self, folder: Path, *, max_alive: int = 4) -> None:
        self._fleet = Fleet(folder=folder)
        self._max_alive = max_alive
        self._alive: dict[Geometry, Engine] = {}
        self._failed: dict[Geometry, str] = {}
        self._models: dict[str, Path] = {}
        self._answers: dict[tuple[str, str], dict[int, SteadyPrompt]] = {}

    def get(self, *wanted: Geometry) -> list[Engine]:
        """These engines, serving. What is missing is started side by side."""
        for one in wanted:
            if one in self._failed:
                raise EngineError(self._failed[one])
            if one in self._alive:
                self._alive[one] = self._alive.pop(one)  # now the last to be stopped
        missing = [one for one in wanted if one not in self._alive or not self._alive[one].alive]
        self._make_room(len(missing), keep=wanted)
        self._start(missing)
        return [self._alive[one] for one in wanted]

    def answers(self, model: str, dtype: str = "bfloat16") -> dict[int, SteadyPrompt]:
        """By prompt length: a steady prompt, and what one engine by itself answers to it (no connector, TP 1)."""
        key = (model, dtype)
        if key not in self._answers:
            alone = Geometry(model=model, dtype=dtype, connector=None)
            [engine] = self.get(alone)
            found = steady_prompts(engine.url, LENGTHS, num_tokens=NUM_TOKENS)
            self._answers[key] = {len(one.prompt): one for one in found}
            self._stop(alone)
        return self._answers[key]

    def rest(self) -> None:
        """Stops every engine, for a test that starts its own."""
        for one in list(self._alive):
            self._stop(one)

    def close(self) -> None:
        self._fleet.close()

    def _start(self, missing: list[Geometry]) -> None:
        options = [self._options(one) for one in missing]
        try:
            started = self._fleet.start(*options, timeout_s=START_TIMEOUT_S)
        except EngineError as error:
            self._failed |= dict.fromkeys(missing, str(error))
            raise
        self._alive |= dict(zip(missing, started, strict=True))

    def _options(self, one: Geometry) -> EngineOptions:
        return EngineOptions(
            name=one.name,
            model=self._model(one.model),
            tp=one.tp,
            block_size=one.block_size,
            dtype=one.dtype,
            connector=one.connector,
            num_blocks=512,
            env=(("VLLM_SERVER_DEV_MODE", "1"),),  # for /reset_prefix_cache
        )

    def _model(self, name: str) -> Path:
        if name not in self._models:
            self._models[name] = build_model_apart(name, self._fleet.folder)
        return self._models[name]

    def _make_room(self, num_new: int, *, keep: tuple[Geometry, ...]) -> None:
        spare = [one for one in self._alive if one not in keep]
        while spare and len(self._alive) + num_new > self._max_alive:
            self._stop(spare.pop(0))

    def _stop(self, one: Geometry) -> None:
        self._fleet.stop([self._alive.pop(one)])


def counted(metrics: Mapping[str, float], name: str) -> float:
    """One of kvplan's own counters, in what an engine's `/metrics` said."""
    return total(metrics, METRICS[name].prometheus)


def forget_prefixes(engine: Engine) -> None:
    """Empties an engine's prefix cache: the next request of the same prompt needs a transfer again."""
    httpx.post(f"{engine.url}/reset_prefix_cache", timeout=10.0).raise_for_status()


def with_policy(policy: str) -> Connector:
    """kvplan's connector with this `kv_load_failure_policy`."""
    return replace(KVPLAN, load_failure_policy=policy)
