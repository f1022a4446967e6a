"""The worker's half of the connector: describes the caches, runs the rank's session, passes results on. No decisions.

Once: ``register`` describes what vLLM allocated, registers it with the transport and starts the session; what is not
recognised is refused there, before the engine serves. Then, every engine step: ``step`` puts what the scheduler's half
asks into the session's queues, ``results`` takes out what ended. Neither waits for a peer.

While requests only wait for cache, or blocks for a reader, vLLM steps without pause and without work (0.32,
``kv_connector_no_forward``). Such an idle step sleeps ``idle_pause_s`` when nothing has ended, so that the threads and
processes that end the waiting get the core. Steps with a forward pass never sleep.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kvplan.errors import KVPlanError
from kvplan.layouts.parallel import Place
from kvplan.session import Identity, RankSession
from kvplan.transport import Device, MemoryRange, create
from kvplan.vllm.caches import storages
from kvplan.vllm.clearing import Clearer
from kvplan.vllm.describe import describe
from kvplan.vllm.fingerprint import compatibility
from kvplan.vllm.groups import read_groups
from kvplan.vllm.metadata import RankMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.session import ReadRequest
    from kvplan.vllm.metadata import StepMetadata
    from kvplan.vllm.settings import Settings

_log = logging.getLogger(__name__)


class Ended(NamedTuple):
    """Requests that ended on this rank since the last step."""

    sent: set[str]
    received: set[str]
    """Failed ones are in here too: vLLM must stop waiting for them."""
    failed: set[str]


def rank_place(vllm_config: Any) -> Place:
    """Return where this worker process stands in its engine."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    parallel = vllm_config.parallel_config
    return Place(
        tp_rank=get_tp_group().rank_in_group,
        pp_rank=get_pp_group().rank_in_group,
        tp=parallel.tensor_parallel_size,
        dcp=parallel.decode_context_parallel_size,
    )


class WorkerSide:
    """One rank's session, and what vLLM is told about it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings, engine_id: str) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._engine_id = engine_id
        self._session: RankSession | None = None
        self._metadata: RankMetadata | None = None
        self._clearer: Clearer | None = None
        self._failed: dict[str, str] = {}
        self._idle = False
        self.rank = 0
        """Index among the engine's ranks, known once the caches are registered."""

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Describe the caches, register their memory, start the session. Raises when something is not recognised."""
        config, settings = self._vllm_config, self._settings
        place = rank_place(config)
        description = describe(config, self._kv_cache_config, kv_caches, place)
        groups = read_groups(self._kv_cache_config, dcp=place.dcp)
        self._clearer = Clearer(self._kv_cache_config, kv_caches, is_state=[group.is_state for group in groups])
        modules = config.compilation_config.static_forward_context.values()
        fields = compatibility(config, settings, modules)
        transport = create(settings.transport, **settings.transport_options)
        transport.register(
            [MemoryRange(address, size, Device.parse(device)) for address, size, device in storages(description.caches)]
        )
        parallel = config.parallel_config
        num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        rank = self.rank = place.pp_rank * place.tp + place.tp_rank
        self._session = RankSession(
            identity=Identity(self._engine_id, rank, num_ranks, fields),
            layout=description.layout,
            transport=transport,
            config=settings.session,
        )
        self._session.set_front_desk(settings.public_host, settings.port)
        self._session.start()
        self._metadata = RankMetadata(self._session.hello(), fields)
        layout = description.layout
        _log.info(
            "rank %d of %d: %d components of %d layers in %d regions", rank, num_ranks, len(layout.components),
            len(description.caches), len(layout.regions),
        )  # fmt: skip

    def metadata(self) -> RankMetadata | None:
        """Return what the scheduler publishes about this rank."""
        return self._metadata

    def step(self, step: StepMetadata, *, idle: bool = False) -> None:
        """Hand one step's wishes to the session. ``idle`` says that the step has no forward pass."""
        self._idle = idle
        session = self._session
        if session is None or not step:
            return
        self._failed.update(step.failures)
        if step.renewals:
            session.renew(step.renewals)
        for remote in step.releases:
            session.release(remote)
        for offer in step.offers:
            session.offer(offer)
        for read in step.reads:
            self._read(session, read)
        for request_id in step.cancels:
            session.cancel(request_id)

    def _read(self, session: RankSession, read: ReadRequest) -> None:
        """Begin a read; one that cannot begin fails, or its request would wait for ever."""
        try:
            if self._clearer is not None:
                self._clearer.clear(read.tables)
            session.read(read)
        except Exception as error:  # noqa: BLE001 - or the request would wait for ever
            _log.exception("request %s: its read did not begin", read.request_id)
            self._failed[read.request_id] = f"its read did not begin: {error}"

    def results(self) -> Ended:
        """Return what ended since the last call; each request once."""
        failed, self._failed = self._failed, {}
        sent: set[str] = set()
        received: set[str] = set()
        if self._session is not None:
            results = self._session.take_results()
            if self._idle and not results and not failed:
                time.sleep(self._settings.idle_pause_s)
                results = self._session.take_results()
            sent, received = set(results.sent), set(results.received)
            failed |= {name: f"{item.reason}: {item.detail}" for name, item in results.failed.items()}
        for name, why in failed.items():
            _log.warning("request %s: its cache was not loaded: %s", name, why)
        return Ended(sent, received | failed.keys(), set(failed))

    def stats(self) -> dict[str, float]:
        """Return the session's counters and gauges."""
        return {} if self._session is None else self._session.stats()

    def close(self) -> None:
        """End the session within its bound."""
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except KVPlanError:
                _log.exception("the session did not close cleanly")
