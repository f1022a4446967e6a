"""vLLM is imported once here, with its own import warnings off; without it this folder is skipped."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    import vllm.distributed.kv_transfer.kv_connector.v1.base
    import vllm.v1.worker.utils
    from vllm.platforms import current_platform

    current_platform.import_kernels()
