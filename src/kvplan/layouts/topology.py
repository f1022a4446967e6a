"""Who we are and who they are: the TP identity of one rank and what it knows of remote engines. No plans.

The names and fields are those of vLLM 0.32 (``kv_connector/utils.py``), so that its engineers find their way. What is
different: nothing here asserts, and no TP size, block size or ratio is refused, because plans come from declarations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from kvplan.errors import LayoutError, SessionError
from kvplan.layouts.parallel import held


@dataclass(frozen=True, slots=True)
class EngineTransferInfo:
    """What is known of one pipeline stage of a remote engine once the handshake is done."""

    remote_tp_size: int
    remote_block_len: int
    """Bytes of one block of one region on one remote rank."""
    remote_block_size: int
    """Tokens per logical block."""
    remote_physical_blocks_per_logical: int = 1
    """Kernel blocks per logical block: the remote's own ratio."""
    remote_pp_rank: int = 0
    start_layer: int = 0
    """First layer of this stage."""
    end_layer: int = 0
    """One past the last layer of this stage."""
    remote_dcp_size: int = 1

    def __post_init__(self) -> None:
        for name in (
            "remote_tp_size",
            "remote_block_len",
            "remote_block_size",
            "remote_physical_blocks_per_logical",
            "remote_dcp_size",
        ):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}; it must be positive")


@dataclass(slots=True)
class TransferTopology:
    """One local rank, and the remote engines that it has met."""

    tp_rank: int
    tp_size: int
    block_size: int
    """Tokens per logical block."""
    engine_id: str
    is_mla: bool
    is_mamba: bool
    total_num_kv_heads: int
    dcp_size: int = 1
    _engines: dict[tuple[str, int], EngineTransferInfo] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise LayoutError(f"tp_rank {self.tp_rank} is not in [0, {self.tp_size})")
        for name in ("block_size", "total_num_kv_heads", "dcp_size"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.tp_size % self.dcp_size:
            raise LayoutError(f"dcp_size {self.dcp_size} does not divide tp_size {self.tp_size}")

    def register_remote_engine(self, remote_engine_id: str, info: EngineTransferInfo) -> EngineTransferInfo:
        """Remember a remote engine's stage and return what is held of it: the first registration stays."""
        if remote_engine_id == self.engine_id:
            raise SessionError(f"engine {self.engine_id!r} is this engine; only remote engines are registered")
        return self._engines.setdefault((remote_engine_id, info.remote_pp_rank), info)

    def unregister_remote_engine(self, remote_engine_id: str) -> None:
        """Forget every stage of a remote engine; one that is not known is no error."""
        for key in [key for key in self._engines if key[0] == remote_engine_id]:
            del self._engines[key]

    def get_engine_info(self, remote_engine_id: str, remote_pp_rank: int = 0) -> EngineTransferInfo:
        """Return what is held of a remote engine's stage; raises SessionError naming the known ones."""
        try:
            return self._engines[remote_engine_id, remote_pp_rank]
        except KeyError:
            known = sorted(self._engines) or "none"
            raise SessionError(
                f"engine {remote_engine_id!r} stage {remote_pp_rank} is not registered; known: {known}"
            ) from None

    @property
    def dcp_rank(self) -> int:
        """Which share of the tokens this rank holds."""
        return self.tp_rank % self.dcp_size

    @property
    def local_physical_heads(self) -> int:
        """KV heads that this rank holds."""
        low, high = held(self.tp_rank // self.dcp_size, self.tp_size // self.dcp_size, self.total_num_kv_heads)
        return high - low

    @property
    def local_replicates_kv_cache(self) -> bool:
        """Whether other ranks of this engine hold the same cache."""
        return self.is_mla or self.tp_size > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Return whether ranks of the remote engine hold the same cache as one another."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return self.is_mla or info.remote_tp_size > self.total_num_kv_heads

    def tp_ratio(self, remote_tp_size: int) -> Fraction:
        """Return local TP size over remote TP size, exactly; any two sizes have one."""
        return Fraction(self.tp_size, remote_tp_size)

    def block_size_ratio(self, remote_block_size: int) -> Fraction:
        """Return local block size over remote block size, exactly; any two sizes have one."""
        return Fraction(self.block_size, remote_block_size)

    def block_len_ratio(self, remote_tp_size: int) -> Fraction:
        """Return remote over local bytes of a block of as many tokens: heads per rank, not TP ratio.

        >>> [TransferTopology(0, d, 16, "d", False, False, k).block_len_ratio(p) for k, p, d in ((8, 2, 8), (2, 4, 8))]
        [Fraction(4, 1), Fraction(1, 1)]
        """
        if self.is_mla:
            return Fraction(1)
        low, high = held(0, remote_tp_size, self.total_num_kv_heads)
        return Fraction(high - low, self.local_physical_heads)


def register_remote_engine(
    transfer_topology: TransferTopology, remote_engine_id: str, info: EngineTransferInfo
) -> EngineTransferInfo:
    """Do what the method of that name does, for those who look for the name at the front door."""
    return transfer_topology.register_remote_engine(remote_engine_id, info)
