"""``KVPlanConnector``: vLLM's hooks, each passed to the scheduler's or the worker's half. It decides nothing.

After start-up no hook may raise into the engine: what goes wrong is logged, and the hook returns what means "nothing";
a request that waits is then failed or recomputed by the engine's policy. At start-up (construction and
``register_kv_caches``) everything raises: an engine that would move wrong bytes must not serve.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvplan.session import FrontDesk
from kvplan.vllm.compat import check_installed, check_parallel, share_logging
from kvplan.vllm.groups import read_groups
from kvplan.vllm.metadata import RankMetadata, StepMetadata
from kvplan.vllm.scheduler import EngineFacts, SchedulerSide
from kvplan.vllm.settings import read_settings
from kvplan.vllm.stats import Differences, PrometheusStats, StepStats
from kvplan.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable

    Hook = TypeVar("Hook", bound=Callable[..., Any])

_log = logging.getLogger(__name__)


def guarded(default: Any) -> Callable[[Hook], Hook]:
    """Return a decorator: a hook that raises is logged and returns ``default``, called when it can be."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:  # noqa: BLE001 - the engine must go on, whatever went wrong
                _log.exception("%s failed; the engine goes on", hook.__name__)
                return default() if callable(default) else default

        return wrapper  # type: ignore[return-value]

    return decorate


def engine_identity(vllm_config: Any) -> str:
    """Return the engine id, new at every start even where the user pinned ``engine_id``."""
    return f"{vllm_config.kv_transfer_config.engine_id}.{vllm_config.instance_id}"


class KVPlanConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV cache between vLLM engines of different geometry."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share_logging()
        check_installed()
        parallel = vllm_config.parallel_config
        check_parallel(parallel)
        settings = read_settings(
            vllm_config.kv_transfer_config.kv_connector_extra_config,
            data_parallel_index=parallel.data_parallel_index,
        )
        self._engine_id = engine_identity(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._desk: FrontDesk | None = None
        self._differences = Differences()
        if role == KVConnectorRole.SCHEDULER:
            facts = _engine_facts(vllm_config, kv_cache_config, settings, self._engine_id)
            self._scheduler = SchedulerSide(
                facts, select=kv_cache_config.select_transfer_block_ids, evict=self._evict_blocks
            )
            self._desk = FrontDesk(host=settings.host, port=settings.port, config=settings.session)
            self._desk.start()
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings, self._engine_id)

    # Scheduler

    def _evict_blocks(self, block_ids: set[int]) -> None:
        if self._kv_cache_manager is not None:
            self._kv_cache_manager.evict_blocks(block_ids)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Publish every rank's hello, in rank order: pipeline stage first, then TP."""
        ranks = [metadata[place] for place in sorted(metadata) if isinstance(metadata[place], RankMetadata)]
        if self._desk is not None and ranks:
            self._desk.publish(self._engine_id, ranks[0].compatibility, [rank.hello for rank in ranks])

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Publish every TP rank's hello."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): item for rank, item in metadata.items()})

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return the groups that a load restores: all that take part in transfers."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    @guarded(None)
    def on_new_request(self, request: Any) -> None:
        """Take note of a request."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load, and that it happens between steps."""
        return self._scheduler.matched_tokens(request, num_computed_tokens) if self._scheduler else (0, False)

    @guarded(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Hand over the read, or release what will not be read."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @guarded(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return what this step asks of the workers."""
        return self._scheduler.build_metadata() if self._scheduler else StepMetadata()

    @guarded(None)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of what the workers reported."""
        if self._scheduler is not None:
            self._scheduler.received(connector_output.finished_recving or (), connector_output.failed_recving or ())

    @guarded((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Offer a finished prefill, or end what an aborted request has elsewhere (one group)."""
        return self._scheduler.request_finished(request, (block_ids,)) if self._scheduler else (False, None)

    @guarded((False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer a finished prefill, or end what an aborted request has elsewhere."""
        return self._scheduler.request_finished(request, block_ids) if self._scheduler else (False, None)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe and register the caches, and start the rank's session. Raises when they are not recognised."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> RankMetadata | None:
        """Return what the scheduler publishes about this rank."""
        return self._worker.metadata() if self._worker else None

    @guarded(None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Hand this step's wishes to the session."""
        if self._worker is not None and isinstance(self._connector_metadata, StepMetadata):
            idle = getattr(forward_context, "attn_metadata", None) is None
            self._worker.step(self._connector_metadata, idle=idle)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads run between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: the reader fetches from the cache itself."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return (sent, received) since the last call."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return what ended since the last call. Failures name requests, never blocks: those of groups overlap."""
        if self._worker is None:
            return KVConnectorTransferResults()
        ended = self._worker.results()
        return KVConnectorTransferResults(ended.sent, ended.received, ended.failed)

    @guarded(None)
    def get_kv_connector_stats(self) -> StepStats | None:
        """Return what was counted since the last call."""
        return self._differences.take(self._worker.stats(), self._worker.rank) if self._worker else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StepStats:
        """Return statistics from what crossed a process."""
        return StepStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PrometheusStats:
        """Return the Prometheus metrics."""
        return PrometheusStats(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(None)
    def shutdown(self) -> None:
        """End the session and the front desk within their bounds."""
        if self._worker is not None:
            self._worker.close()
        if self._desk is not None:
            self._desk.close()


def _engine_facts(vllm_config: Any, kv_cache_config: Any, settings: Any, engine_id: str) -> EngineFacts:
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    dcp = parallel.decode_context_parallel_size
    return EngineFacts(
        engine_id=engine_id,
        host=settings.public_host,
        port=settings.port,
        groups=read_groups(kv_cache_config, dcp=dcp),
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dcp=dcp,
        is_producer=transfer.is_kv_producer,
        is_consumer=transfer.is_kv_consumer,
        recompute=transfer.kv_load_failure_policy == "recompute",
        lease_s=settings.session.lease_s,
        heartbeat_s=settings.session.heartbeat_s,
    )
