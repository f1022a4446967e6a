"""The scheduler's half of the connector: request by request, block id lists become block tables. No bytes, no sockets.

Prefill side: a finished request with ``do_remote_decode`` becomes an ``Offer``; its parameters go back to the router.
Decode side: a new request with ``do_remote_prefill`` becomes an ``Incoming``; the tokens that the local prefix cache
lacks become a ``ReadRequest``; nothing to read, or an abort, becomes a release. Each goes to the workers with the
metadata of the next engine step. Nothing here raises for what a router or a peer sent.

The decode engine computes the prompt's last token in any case, to sample from it. Where that needs what is gone once
the token is computed (a state, which cannot be rolled back; the block that a window has just left), the prefill engine
stops one token before the prompt's end.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplan.errors import BindError
from kvplan.session import Offer, ReadRequest, RemoteRef
from kvplan.vllm.groups import block_tables, half_filled_blocks, with_needs
from kvplan.vllm.incoming import Incoming, Incomings, Stage
from kvplan.vllm.metadata import StepMetadata
from kvplan.vllm.params import (
    Handoff,
    ParamsError,
    decode,
    encode,
    prompt_digest,
    wants_remote_decode,
    wants_remote_prefill,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvplan.vllm.groups import Group

_log = logging.getLogger(__name__)

_OFFERED_STATUSES = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Statuses of a finished prefill whose cache is whole."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the scheduler's half knows about its engine."""

    engine_id: str
    host: str
    port: int
    groups: tuple[Group, ...]
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    is_producer: bool = True
    is_consumer: bool = True
    recompute: bool = False
    """True when the engine recomputes what could not be loaded; False when it fails the request."""
    lease_s: float = 30.0
    heartbeat_s: float = 5.0

    @property
    def has_state(self) -> bool:
        """Whether some group holds state, which cannot be rolled back."""
        return any(group.is_state for group in self.groups)

    @property
    def stops_early(self) -> bool:
        """Whether prefill stops one token before the prompt's end."""
        return any(group.is_state or group.drops_blocks for group in self.groups)


class SchedulerSide:
    """Follows every request that comes from, or goes to, another engine."""

    def __init__(
        self,
        facts: EngineFacts,
        *,
        select: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]] = tuple,
        evict: Callable[[set[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        nonce: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """``select`` picks the groups that take part in transfers; ``evict`` drops blocks from the prefix cache."""
        self._facts = facts
        self._select = select
        self._evict = evict
        self._clock = clock
        self._nonce = nonce
        self._incoming = Incomings()
        self._step = StepMetadata()
        self._beat_at = 0.0

    # Both sides

    def on_new_request(self, request: Any) -> None:
        """Take note of a request; on the prefill side, drop the token that only decode may compute."""
        params = request.kv_transfer_params
        if wants_remote_decode(params) and self._facts.stops_early:
            drop_last_token(request)
        if wants_remote_prefill(params):
            self._incoming.add(self._read_params(request, params))

    def build_metadata(self) -> StepMetadata:
        """Return what this step asks of the workers."""
        step, self._step = self._step, StepMetadata()
        now = self._clock()
        if now - self._beat_at >= self._facts.heartbeat_s:
            self._beat_at = now
            step.renewals = [item.handoff.remote for item in self._incoming if item.handoff and item.stage is Stage.NEW]
        for item in self._incoming:
            if item.stage is Stage.DONE:
                self._drop_half_filled(item)
        return step

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks must be kept, and the parameters for the router."""
        self._leave(request.request_id)
        if not wants_remote_decode(request.kv_transfer_params) or request.status.name not in _OFFERED_STATUSES:
            return False, None
        if not self._facts.is_producer:
            _log.warning("request %s: do_remote_decode, but kv_role is kv_consumer; not offered", request.request_id)
            return False, None
        return self._offer(request, block_ids)

    # Prefill side

    def _offer(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        facts = self._facts
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        try:
            self._check_state(request.num_computed_tokens, num_tokens)
            tables = block_tables(facts.groups, self._select(block_ids), first=0, last=num_tokens)
        except BindError as error:
            _log.warning("request %s is not offered to a decode engine: %s", request.request_id, error)
            return False, None
        offer = Offer(request.request_id, self._nonce(), tables, num_tokens, facts.lease_s)
        self._step.offers.append(offer)
        remote = RemoteRef(
            facts.engine_id, facts.host, facts.port, offer.request_id, offer.generation, tables, num_tokens
        )
        digest = prompt_digest(request.prompt_token_ids, num_tokens, adapter_name(request))
        handoff = Handoff(remote, facts.lease_s, digest)
        return True, encode(handoff, request.kv_transfer_params, tp=facts.tp, pp=facts.pp, dcp=facts.dcp)

    def _check_state(self, num_computed: int, num_tokens: int) -> None:
        """Refuse a request whose state, which cannot be rolled back, ran ahead of the prompt."""
        if self._facts.has_state and num_computed != num_tokens:
            raise BindError(f"its state is that after {num_computed} tokens, not after {num_tokens}")

    # Decode side

    def _read_params(self, request: Any, params: dict[str, Any]) -> Incoming:
        """Return the request's record; what cannot be used is a problem of this request, with a clear line."""
        try:
            handoff = decode(params)
        except ParamsError as error:
            _log.warning("request %s: kv_transfer_params cannot be used: %s", request.request_id, error)
            return Incoming(request.request_id, None, str(error))
        problem = self._problem(request, handoff)
        if problem:
            _log.warning("request %s: its cache cannot be loaded: %s", request.request_id, problem)
        return Incoming(request.request_id, handoff, problem)

    def _problem(self, request: Any, handoff: Handoff) -> str:
        """Return why the offered cache is not this request's; empty when it is."""
        if not self._facts.is_consumer:
            return "do_remote_prefill, but kv_role is kv_producer"
        offered, wanted = handoff.remote.num_tokens, self._wanted_tokens(request)
        if offered > request.num_prompt_tokens:
            return f"the prefill engine offers {offered} tokens, the prompt has {request.num_prompt_tokens}"
        if self._facts.has_state and wanted and offered != wanted:
            return f"the prefill engine offers the state after {offered} tokens, the state after {wanted} is needed"
        ours = prompt_digest(request.prompt_token_ids, offered, adapter_name(request))
        if ours and handoff.prompt_digest and ours != handoff.prompt_digest:
            return f"the first {offered} tokens of the prompt (or the adapter) differ from what was computed"
        return ""

    def _wanted_tokens(self, request: Any) -> int:
        """Return how many of the prompt's tokens are useful: all, or all but the one that is not prefilled."""
        return int(request.num_prompt_tokens) - (1 if self._facts.stops_early else 0)

    def matched_tokens(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return (tokens to load beyond ``num_computed``, whether asynchronously); (None, False) means ask again."""
        item = self._incoming.get(request.request_id)
        if item is None or item.stage is not Stage.NEW or (item.problem and self._facts.recompute):
            return 0, False
        if self._incoming.read_by_sibling(item):
            return (None, False) if self._incoming.sibling_loads(item) else (0, False)
        offered = item.handoff.remote.num_tokens if item.handoff else request.num_prompt_tokens
        item.num_tokens = min(offered, self._wanted_tokens(request))
        item.num_external = max(0, item.num_tokens - num_computed)
        return item.num_external, item.num_external > 0

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """Take note that blocks are there: hand over the read, or release what will not be read."""
        item = self._incoming.get(request.request_id)
        if item is None or item.stage is Stage.LOADING:
            return
        if item.stage is Stage.DONE:
            self._drop_half_filled(item)
            item.half_filled.clear()
        elif num_external == 0:
            self._release(item)
            item.advance(Stage.DONE)
        else:
            self._load(item, block_ids, num_external)

    def _load(self, item: Incoming, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        try:
            if not item.problem and item.handoff is not None:
                self._step.reads.append(self._read(item, item.handoff, block_ids, num_external))
        except BindError as error:
            item.problem = str(error)
        except Exception as error:  # noqa: BLE001 - or the request would wait for ever
            _log.exception("request %s: its read was not made", item.request_id)
            item.problem = f"its read was not made: {error!r}"
        if item.problem:
            _log.warning("request %s: its cache is not loaded: %s", item.request_id, item.problem)
            self._step.failures[item.request_id] = item.problem
            self._release(item)
        item.advance(Stage.LOADING)

    def _read(
        self, item: Incoming, handoff: Handoff, block_ids: Sequence[Sequence[int]], num_external: int
    ) -> ReadRequest:
        """Return the read of the tokens that the local prefix cache lacks. Raises ``BindError``."""
        if num_external != item.num_external:
            raise BindError(f"{num_external} tokens are to be loaded, {item.num_external} were promised")
        first, last = item.num_tokens - num_external, item.num_tokens
        groups = self._facts.groups
        tables = block_tables(groups, self._select(block_ids), first=first, last=last)
        item.half_filled = half_filled_blocks(groups, tables, handoff.first_kept_token)
        self._incoming.set_reader(item)
        return ReadRequest(item.request_id, handoff.remote, with_needs(groups, tables, last=last))

    def received(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> None:
        """Take note of reads that the workers reported, successful or not."""
        for request_id in request_ids:
            item = self._incoming.get(request_id)
            if item is not None and item.stage is Stage.LOADING:
                item.advance(Stage.DONE)
                if request_id in failed:
                    item.half_filled.clear()

    def _leave(self, request_id: str) -> None:
        """Forget a request that has ended; end what it still has elsewhere."""
        item = self._incoming.get(request_id)
        if item is None:
            return
        if item.stage is Stage.NEW:
            self._release(item)
        elif item.stage is Stage.LOADING:
            self._step.cancels.append(request_id)
        self._incoming.drop(request_id)

    def _release(self, item: Incoming) -> None:
        """Tell the producer that nobody reads the handoff, unless a sibling reads it or may still."""
        if item.handoff is not None and self._incoming.is_last(item):
            self._step.releases.append(item.handoff.remote)

    def _drop_half_filled(self, item: Incoming) -> None:
        """Take blocks out of the prefix cache whose first tokens were never loaded, once vLLM has put them there."""
        if self._evict is None or not item.half_filled:
            return
        try:
            self._evict(item.half_filled)
        except Exception:  # noqa: BLE001 - the engine must go on
            _log.exception("request %s: its half-filled blocks stay in the prefix cache", item.request_id)


def drop_last_token(request: Any) -> bool:
    """Shorten a prefill request by the token that the decode engine computes; return whether it was.

    Prompts of one token stay: the decode engine then loads nothing.
    """
    if request.num_prompt_tokens < 2 or request.get_skip_reading_prefix_cache():
        return False
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:]
    elif request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    del request._all_token_ids[-1:]  # noqa: SLF001 - vLLM has no public way (as in its NIXL connector, 0.32)
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    return True


def adapter_name(request: Any) -> str:
    """Return the name of the request's LoRA adapter; empty without one."""
    return str(request.lora_request.lora_name) if request.lora_request is not None else ""
