"""Tiny models with seeded random weights, written to a folder without any hub. Only for demos and tests.

Each comes with a tokenizer whose words are `t4` ... `t511`, so that any list of ordinary ids is a text and back.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvplan.errors import EngineError

__all__ = ["MODELS", "TinyModel", "build_model", "build_model_apart"]

VOCAB_SIZE = 512
SPECIAL_WORDS = ("<unk>", "<eos>", "<bos>", "<pad>")
"""The words of ids 0 to 3. They must not be the beginning of another word: the tokenizer would cut it there."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""A conversation is what was said in it, nothing more."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model family at toy size."""

    name: str
    config_class: str
    """Name of the configuration class in `transformers`; the model class is found by it."""
    fields: dict[str, Any] = field(hash=False)
    seed: int = 0


_ATTENTION = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 32,
    # Wide enough that the answer depends on every token of the prompt, narrow enough that it mostly does not depend on
    # rounding. With 0.12, TP 1 and TP 2 disagree within 12 tokens on a third of all prompts; with 0.04 the answer is
    # one token over and over.
    "initializer_range": 0.06,
}

MODELS = {
    model.name: model
    for model in (
        TinyModel("llama", "LlamaConfig", _ATTENTION | {"num_key_value_heads": 4}),
        TinyModel("llama-one-kv-head", "LlamaConfig", _ATTENTION | {"num_key_value_heads": 1}),
        TinyModel("llama-more-layers", "LlamaConfig", _ATTENTION | {"num_key_value_heads": 4, "num_hidden_layers": 5}),
    )
}
"""By name. The last exists to be refused by a decode engine of the first."""


def build_model(name: str, folder: Path, *, dtype: str = "bfloat16") -> Path:
    """Writes model `name` to `folder`/`name` and returns that path. Imports torch and transformers."""
    model = _known(name)
    import torch
    import transformers

    torch.manual_seed(model.seed)
    config = getattr(transformers, model.config_class)(**model.fields)
    path = folder / name
    transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(path)
    _write_tokenizer(path)
    return path


def build_model_apart(name: str, folder: Path, *, dtype: str = "bfloat16") -> Path:
    """The same as `build_model`, in a process of its own: this one need not import torch."""
    _known(name)
    command = [sys.executable, "-m", "kvplan.engines.models", name, str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise EngineError(f"model {name!r} could not be built in {folder}:\n{done.stderr[-2000:]}")
    return folder / name


def _known(name: str) -> TinyModel:
    if name not in MODELS:
        raise EngineError(f"unknown tiny model {name!r}; known are {', '.join(sorted(MODELS))}")
    return MODELS[name]


def _write_tokenizer(path: Path) -> None:
    import tokenizers
    import transformers

    unknown, end, begin, padding = SPECIAL_WORDS
    words = dict(zip((*SPECIAL_WORDS, *(f"t{i}" for i in range(4, VOCAB_SIZE))), range(VOCAB_SIZE), strict=True))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, eos_token=end, bos_token=begin, pad_token=padding
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


if __name__ == "__main__":
    build_model(sys.argv[1], Path(sys.argv[2]), dtype=sys.argv[3])
