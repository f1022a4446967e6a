"""vLLM is imported once here, with its own import warnings off; without it this folder is skipped."""

import importlib
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    for name in ("vllm.distributed.kv_transfer.kv_connector.v1.base", "vllm.v1.worker.utils"):
        importlib.import_module(name)
    importlib.import_module("vllm.platforms").current_platform.import_kernels()
