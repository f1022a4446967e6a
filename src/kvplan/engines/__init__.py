"""Tiny models and real vLLM engines on this machine, for demos and tests. Nothing in the other rooms needs this one."""

from kvplan.engines.client import (
    Answer,
    complete,
    external_tokens,
    prefill,
    prefill_and_decode,
    read_metrics,
    total,
)
from kvplan.engines.engine import Engine, Progress
from kvplan.engines.fleet import Fleet, terminate_as_exit
from kvplan.engines.models import MODELS, TinyModel, build_model, build_model_apart
from kvplan.engines.options import KVPLAN, NIXL, Connector, EngineOptions
from kvplan.engines.prompts import completion_body, make_prompt, prompt_text
from kvplan.engines.steady import SteadyPrompt, steady_prompt, steady_prompts

__all__ = [
    "KVPLAN",
    "MODELS",
    "NIXL",
    "Answer",
    "Connector",
    "Engine",
    "EngineOptions",
    "Fleet",
    "Progress",
    "SteadyPrompt",
    "TinyModel",
    "build_model",
    "build_model_apart",
    "complete",
    "completion_body",
    "external_tokens",
    "make_prompt",
    "prefill",
    "prefill_and_decode",
    "prompt_text",
    "read_metrics",
    "steady_prompt",
    "steady_prompts",
    "terminate_as_exit",
    "total",
]
