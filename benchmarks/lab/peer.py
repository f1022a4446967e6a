"""vLLM 0.32's NIXL connector, pull direction, as it moves bytes: its own functions, on a plain object in place of `self`.

What is called is vLLM's code as it is installed: ``_build_fa_local``, ``_build_fa_remote``, ``_build_local_splits_from_plan``
and ``_compute_desc_ids`` of ``NixlBaseConnectorWorker``, ``compute_tp_mapping``, the functions that rearrange received
blocks (``kv_connector/utils.py``), and NIXL's Python API as ``add_remote_agent`` and ``_read_blocks`` call it. What is left
out favours it: no scheduler, no notification, no polling once an engine step.

One relief, without which nothing else could be measured on two cores: its progress thread sleeps 10 ms between two looks,
as kvplan's does, where it would spin. Over CMA a read is synchronous and does not need it.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

PROGRESS_DELAY_US = 10_000


@contextmanager
def relieved():
    """Let agents that are made in the block have a progress thread that sleeps."""
    import nixl_cu12._api as api

    original = api.nixlBind.nixlAgent

    def make(name, config):
        config.pthrDelay = PROGRESS_DELAY_US
        return original(name, config)

    api.nixlBind.nixlAgent = make
    try:
        yield api
    finally:
        api.nixlBind.nixlAgent = original


def make_agent(name):
    """Return an agent as vLLM makes it (``num_threads`` 4, telemetry on)."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    with relieved() as api:
        return api.nixl_agent(name, api.nixl_agent_config(num_threads=4, capture_telemetry=True))


def worker_class():
    """Return vLLM's worker class, whose methods are borrowed."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    return NixlBaseConnectorWorker


def tp_mapping(tp_rank, tp_size, remote_tp_size, num_heads):
    """Return vLLM's mapping of one decode rank for one attention group."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    topology = SimpleNamespace(
        tp_rank=tp_rank, tp_size=tp_size, total_num_kv_heads=num_heads, is_mla=False,
        dcp_consumer_count=lambda remote_tp, remote_dcp: max(1, tp_size // remote_tp),
    )  # fmt: skip
    return compute_tp_mapping(topology, remote_tp_size, (FullAttentionSpec,)), FullAttentionSpec


def stand_in(regions, block_size, mapping_spec):
    """Return what the borrowed methods read off ``self``: one rank whose regions all belong to one attention group."""
    return SimpleNamespace(
        transfer_topo=SimpleNamespace(),
        device_id=0,
        block_size=block_size,
        block_len_per_layer=[r.block_stride_bytes for r in regions],
        block_stride_per_layer=[r.block_stride_bytes for r in regions],
        region_num_blocks=[r.num_blocks for r in regions],
        num_regions=len(regions),
        region_group_ids=[0] * len(regions),
        kv_caches_base_addr=[r.base for r in regions],
        _transfer_layer_region_indices=(),
        _transfer_layer_group_ids=(),
        _group_spec_types=(mapping_spec,),
        _region_is_mla=[],
        _ple_region_index=None,
        _logical_num_blocks=0,
        _has_mamba=False,
        _uses_region_group_mapping=False,
    )


def borrow(stand, name):
    """Return one of vLLM's methods bound to the stand-in."""
    method = getattr(worker_class(), name)
    return lambda *arguments, **options: method(stand, *arguments, **options)


class PeerReader:
    """One decode rank as vLLM's connector would read: prepared descriptors for every block of every remote rank."""

    def __init__(self, agent, regions, *, block_size, tp_rank, tp_size, num_heads):
        self.agent = agent
        self.regions = regions
        self.block_size = block_size
        self._place = (tp_rank, tp_size, num_heads)
        self._agents = {}
        reg = agent.get_reg_descs([(r.base, r.num_bytes, 0, "") for r in regions], "DRAM")
        agent.register_memory(reg, backends=["UCX"])

    def handshake(self, remotes, *, remote_block_size):
        """Prepare everything for an engine: ``remotes`` are (agent metadata, regions) by rank. As ``add_remote_agent``."""
        tp_rank, tp_size, num_heads = self._place
        self.mapping, spec = tp_mapping(tp_rank, tp_size, len(remotes), num_heads)
        self.ratio = self.block_size // remote_block_size
        for rank in self.mapping.all_source_ranks:
            if rank not in self._agents:
                self._agents[rank] = self.agent.add_remote_agent(remotes[rank][0])
        stand = self.stand = stand_in(self.regions, self.block_size, spec)
        stand._fa_desc_replicated = borrow(stand, "_fa_desc_replicated")
        stand._is_region_replicated = borrow(stand, "_is_region_replicated")
        stand._stack_descs = worker_class()._stack_descs
        local = borrow(stand, "_build_fa_local")(stand.kv_caches_base_addr, self.ratio)
        if len(self.mapping.all_source_ranks) > 1:
            split = borrow(stand, "_build_local_splits_from_plan")(self.mapping, local, len(local), self.ratio)
            self.local = [self._prepared("NIXL_INIT_AGENT", data) for data in split]
        else:
            self.local = [self._prepared("NIXL_INIT_AGENT", local)]
        self.remote, self.remote_blocks = [], {}
        for rank in self.mapping.all_source_ranks:
            regions = remotes[rank][1]
            metadata = SimpleNamespace(
                kv_caches_base_addr=[r.base for r in regions], num_blocks=regions[0].num_blocks,
                region_num_blocks=[r.num_blocks for r in regions], device_id=0,
                block_strides=[r.block_stride_bytes for r in regions],
            )  # fmt: skip
            data = borrow(stand, "_build_fa_remote")(self.mapping, metadata, self.ratio)
            self.remote.append(self._prepared(self._agents[rank], data))
            self.remote_blocks[rank] = metadata.region_num_blocks

    def read(self, source_ids, destination_ids):
        """Read a request; block ids are in table order. As ``_read_blocks`` and the loop over source ranks."""
        stand, ids = self.stand, borrow(self.stand, "_compute_desc_ids")
        if self.ratio > 1:  # as _map_block_ids_for_block_size_ratio
            destination_ids = (np.repeat(destination_ids, self.ratio) * self.ratio).reshape(-1, self.ratio)
            destination_ids = (destination_ids + np.arange(self.ratio)).reshape(-1)[: len(source_ids)]
        there, here = [source_ids], [destination_ids]
        handles = []
        for rank, local, remote in zip(self.mapping.all_source_ranks, self.local, self.remote, strict=True):
            counts = self.remote_blocks[rank]
            remote_ids = ids(there, counts[0], None, 1, counts, [0] * len(counts), False)
            local_ids = ids(
                here, stand.region_num_blocks[0], self.ratio, 1, stand.region_num_blocks, [0] * len(counts), False
            )
            handle = self.agent.make_prepped_xfer("READ", local, local_ids, remote, remote_ids)
            self.agent.transfer(handle)
            handles.append(handle)
        for handle in handles:
            wait_for(self.agent, handle)
        self.num_descriptors = sum(len(self.regions) * len(source_ids) for _ in handles)

    def rearrange(self, caches, destination_ids, *, permute):
        """Bring received blocks into local order, as ``post_process_device_kv_on_receive`` does; caches are [B,H,N,C]."""
        import torch
        from vllm.distributed.kv_transfer.kv_connector import utils

        indices = torch.from_numpy(destination_ids)
        for cache in caches:
            if permute:
                utils.kv_postprocess_blksize_and_layout_on_receive(cache, indices, self.ratio)
            else:
                utils.kv_postprocess_blksize_on_receive(cache, indices, self.ratio)

    def _prepared(self, agent, data):
        return self.agent.prep_xfer_dlist(agent, self.agent.get_xfer_descs(data, "DRAM"))


class IdealReader:
    """NIXL alone on given descriptors, which are merged and in order already: the limit of what NIXL can do."""

    def __init__(self, agent, remote_agent):
        self.agent = agent
        self.remote_agent = remote_agent

    def read(self, runs):
        local, remote = (np.zeros((len(runs), 3), np.uint64) for _ in range(2))
        local[:, 0], remote[:, 0] = runs.destination_address, runs.source_address
        local[:, 1] = remote[:, 1] = runs.num_bytes
        descs = [self.agent.get_xfer_descs(rows, "DRAM") for rows in (local, remote)]
        handle = self.agent.initialize_xfer("READ", *descs, self.remote_agent)
        self.agent.transfer(handle)
        wait_for(self.agent, handle)


def wait_for(agent, handle):
    """Wait until a transfer has ended, and release it."""
    while (state := agent.check_xfer_state(handle)) == "PROC":
        time.sleep(0)
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise RuntimeError(f"NIXL says {state}")
