"""Every knob of a session and its default, and who a rank is. No behaviour beyond checking the values."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from kvplan.errors import DescriptionError
from kvplan.wire.security import FILE_MARK

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_VARIABLE = "KVPLAN_SIDE_CHANNEL_KEY"
"""Environment variable that holds the shared key of the side channel."""

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """Who one rank is."""

    engine_id: str
    """New at every start of the engine."""
    rank: int
    """Index into the ranks of the engine's layout."""
    num_ranks: int
    compatibility: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Named fields that must be equal on both sides, as text; see ``kvplan.wire.compatibility``."""

    def __post_init__(self) -> None:
        if not self.engine_id:
            raise DescriptionError("engine_id is empty")
        if not 0 <= self.rank < self.num_ranks:
            raise DescriptionError(f"rank {self.rank} is not in [0, {self.num_ranks})")


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """All knobs. Times are seconds on this machine's own monotonic clock."""

    # Leases: what the producer promises, and how the consumer keeps it alive.
    lease_s: float = 30.0
    """How long an offer is kept for a first reader, when the offer itself does not say."""
    heartbeat_s: float = 5.0
    """Time between two renewals of one peer rank (one message, however many requests)."""
    extension_s: float = 20.0
    """How far a claim or a renewal moves a lease; more than three heartbeats, so that two may be lost."""
    lease_margin_s: float = 0.25
    """Bytes that arrive later than this before the end of a known lease are not believed."""
    hold_s: float = 120.0
    """How long ``renew`` keeps a waiting request's lease alive after its last mention."""

    # Waits: each one ends in a reason.
    claim_park_s: float = 5.0
    """How long a producer keeps a claim for a request that it does not know yet."""
    handshake_timeout_s: float = 20.0
    """How long a read waits for first contact with its peer, retries included."""
    hello_timeout_s: float = 5.0
    """How long one attempt waits for one answer."""
    claim_timeout_s: float = 15.0
    """How long a claim may stay unanswered; more than ``claim_park_s``."""
    transfer_timeout_s: float = 60.0
    """How long a read may take from the first claim; longer than that it fails when its last write has ended."""
    backoff_s: float = 0.1
    """Wait before the second attempt of a handshake; doubled up to ``backoff_max_s``."""
    backoff_max_s: float = 2.0
    resend_s: float = 1.0
    """How long an unanswered claim, done or release waits before it is sent again."""
    resend_limit: int = 30
    """How often a done or a release is sent before it is given up (the lease ends anyway)."""
    peer_idle_s: float = 600.0
    """A peer without reads for so long is forgotten."""
    poll_s: float = 0.001
    """Least time between two looks at transfers that are pending."""
    poll_max_s: float = 0.02
    """Most time between two looks at transfers that have been pending for long."""
    close_timeout_s: float = 5.0
    """How long ``close`` waits for outstanding transfers."""

    # Moving bytes.
    whole_blocks: bool = True
    """Move the last block whole (the runtime's way); False clips exactly at the number of tokens."""
    read_retries: int = 1
    """How often one failed piece of a read is read again."""
    max_posted: int = 64
    """Posts that may be in flight."""
    max_post_bytes: int = 32 << 20
    """Largest single post; larger reads are posted in pieces, between which peers take turns and messages are heard."""
    staging_threshold_bytes: int = 32 << 10
    """Runs of this length or more are read straight; of shorter ones the cost model says which pass through staging."""
    staging_bytes: int = 64 << 20
    """Size of the staging area, which exists only when a request needs it; 0 turns staging off."""
    staging_slots: int = 8
    """Parts of the staging area, each for one batch in flight."""
    staging_gap_bytes: int = 16 << 10
    """Runs at most so far apart may be staged by one read, gap included; less where a descriptor costs less."""
    staging_read_bytes: int = 4 << 20
    """Largest single read into staging."""
    staging_chunk_bytes: int = 1 << 20
    """Least that one batch brings into staging when a read is staged in several: a scatter begins the earlier."""
    staging_threads: int = 1
    """Threads that scatter while the next batch is read; 0 scatters between reads."""
    calibration_file: str = ""
    """What ``kvplan bench --output`` has measured here: the cost model. Empty means built-in values."""
    descriptor_us: float = 0.0
    """Microseconds that one descriptor of a read costs. This and the next three: 0 leaves the cost model as it is."""
    read_gbps: float = 0.0
    """Gigabytes a second that a read brings."""
    scatter_run_us: float = 0.0
    """Microseconds that one run of a scatter out of staging costs."""
    scatter_gbps: float = 0.0
    """Gigabytes a second that one thread scatters."""

    # Verifying what has been moved.
    verify_rate: float = 0.0
    """Share of reads, 0 to 1, whose bytes are compared with the producer's by digests before they are believed."""
    verify_timeout_s: float = 30.0
    """How long that may take for one read; more than so long fails it."""

    # Bounds: overload refuses, nothing grows.
    max_queue: int = 8192
    """Commands from the engine thread that may wait."""
    max_reads: int = 4096
    """Reads that may be outstanding."""
    max_offers: int = 65536
    """Offers that may be live."""
    max_parked: int = 4096
    """Claims and notices that may wait for their offer."""
    max_remembered: int = 65536
    """Ended references that are remembered, so that refusals can say why."""
    max_peers: int = 256
    """Engines that are known at one time, on each side."""
    max_digests: int = 256
    """Questions for digests, of peers and of our own, that may wait for the one thread that answers them."""

    # The side channel.
    host: str = "127.0.0.1"
    """Address that the rank's control socket binds."""
    advertise_host: str = ""
    """Address that peers are told; empty means ``host``."""
    side_channel_key: str = field(default="", repr=False)
    """Shared key of at least 16 characters, or ``@path`` of a key file; empty: no encryption, for loopback only."""
    insecure: bool = False
    """True allows an unencrypted side channel on other addresses than loopback."""
    allowed_peers: tuple[str, ...] = ()
    """Hosts or networks (``10.0.0.0/8``) that may be connected to, and may connect; empty means all."""
    max_message_bytes: int = 64 << 20
    """Largest message that is accepted."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and value < 0:
                raise DescriptionError(f"{item.name} is {value}; it must not be negative")
        if self.extension_s <= 2 * self.heartbeat_s:
            raise DescriptionError(
                f"extension_s {self.extension_s} must exceed two heartbeats of {self.heartbeat_s} s, "
                "or one lost message ends a live request's lease"
            )
        if self.lease_margin_s >= self.extension_s:
            raise DescriptionError(f"lease_margin_s {self.lease_margin_s} must be below extension_s {self.extension_s}")
        if not (self.staging_slots and self.max_posted and self.max_post_bytes):
            raise DescriptionError("staging_slots, max_posted and max_post_bytes must be at least 1")
        if not 0 <= self.verify_rate <= 1:
            raise DescriptionError(f"verify_rate is {self.verify_rate}; it is a share of all reads, from 0 to 1")
        key = self.side_channel_key
        if key and len(key) < 16 and not key.startswith(FILE_MARK):
            raise DescriptionError("side_channel_key is shorter than 16 characters")

    @property
    def slot_bytes(self) -> int:
        """Size of one part of the staging area, whole pages; 0 when staging is off."""
        return self.staging_bytes // self.staging_slots // PAGE_BYTES * PAGE_BYTES

    @property
    def public_host(self) -> str:
        """The address that peers are told."""
        return self.advertise_host or self.host

    def with_environment(self, environ: Mapping[str, str] | None = None) -> SessionConfig:
        """Return the config with the side channel's key from the environment, unless it already has one."""
        key = (os.environ if environ is None else environ).get(KEY_VARIABLE, "")
        return replace(self, side_channel_key=key) if key and not self.side_channel_key else self

    @staticmethod
    def of(options: Mapping[str, object]) -> SessionConfig:
        """Return a config from named options, as an extra config brings them; unknown or ill-typed ones are refused."""
        known = {item.name: item for item in fields(SessionConfig)}
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise DescriptionError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(known))}")
        defaults = SessionConfig()
        typed: dict[str, Any] = {name: _typed(name, value, getattr(defaults, name)) for name, value in options.items()}
        return replace(defaults, **typed)


def _typed(name: str, value: object, default: object) -> object:
    """Return the value in the default's type; whole numbers may stand for floats, lists for tuples."""
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list | tuple):
        return tuple(str(item) for item in value)
    if type(value) is not type(default):
        raise DescriptionError(f"option {name!r} is {value!r}; expected {type(default).__name__}")
    return value
