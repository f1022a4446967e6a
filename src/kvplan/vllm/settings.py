"""What users may set for the connector, where it is read from, and what it defaults to. No sockets, no sessions.

Sources, first one wins:

1. the environment: ``KVPLAN_SIDE_CHANNEL_HOST``, ``KVPLAN_SIDE_CHANNEL_PORT``;
2. ``kv_connector_extra_config``: the fields below, and every field of ``SessionConfig`` by its name;
3. what a deployment of vLLM's NIXL connector sets: ``VLLM_NIXL_SIDE_CHANNEL_HOST``, ``VLLM_NIXL_SIDE_CHANNEL_PORT``,
   and the extra config keys in ``NIXL_KEYS``, so that such a deployment works unchanged;
4. the defaults.

The port is a base: data-parallel engine ``i`` listens on ``port + i``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from kvplan.errors import DescriptionError
from kvplan.session import SessionConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 5600
"""The base port of vLLM's NIXL connector."""

WILDCARDS = ("0.0.0.0", "::", "*", "")  # noqa: S104 - named to refuse advertising them
"""Addresses that a socket can bind and a peer cannot reach."""

NIXL_KEYS = {
    "kv_lease_duration": "lease_s",
    "backends": "backends",
    "engine_ttl": "peer_idle_s",
}
"""Extra config keys of vLLM's NIXL connector that mean something here, and what they set."""

NIXL_KEYS_WITHOUT_MEANING = (
    "bidirectional_kv_xfer",
    "decoder_kv_blocks_ttl",
    "enforce_handshake_compat",
    "kv_recompute_threshold",
    "num_threads",
    "push_registration_timeout",
)
"""Keys of vLLM's NIXL connector that are accepted and do nothing here."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All of the connector's own settings, and the session's."""

    host: str = DEFAULT_HOST
    """Address that the front desk binds."""
    advertise_host: str = ""
    """Address that goes into ``remote_host``; empty means ``host``."""
    port: int = DEFAULT_PORT
    """Port of this engine's front desk; the data-parallel index is already added."""
    transport: str = "nixl"
    """Name of the transport."""
    transport_options: dict[str, Any] = field(default_factory=dict)
    """Keyword options of the transport."""
    idle_pause_s: float = 0.001
    """How long an engine step sleeps that has nothing to compute and nothing to report."""
    session: SessionConfig = field(default_factory=SessionConfig)

    @property
    def public_host(self) -> str:
        """The address that peers are told."""
        return self.advertise_host or self.host


def read_settings(
    extra: Mapping[str, Any], *, data_parallel_index: int = 0, environ: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings; an unknown key, an ill-typed value or an address that no peer can reach is refused."""
    environ = os.environ if environ is None else environ
    extra = {key: value for key, value in extra.items() if key not in NIXL_KEYS_WITHOUT_MEANING}
    host = str(_first(environ, extra, "HOST", DEFAULT_HOST))
    advertise = str(extra.get("side_channel_advertise_host", ""))
    _check_reachable(host, advertise)
    port = _port(_first(environ, extra, "PORT", DEFAULT_PORT)) + data_parallel_index
    if not 0 < port < 65536:
        raise DescriptionError(f"side channel port is {port}; it must be in [1, 65535]", field="side_channel_port")
    options = extra.get("transport_options", {})
    if not isinstance(options, dict):
        raise DescriptionError(f"transport_options is {options!r}; it must be an object", field="transport_options")
    if "backends" in extra:
        options = {"backends": tuple(extra["backends"]), **options}
    return Settings(
        host=host,
        advertise_host=advertise,
        port=port,
        transport=str(extra.get("transport", "nixl")),
        transport_options=dict(options),
        idle_pause_s=_pause(extra.get("idle_pause_s", Settings().idle_pause_s)),
        session=_session(extra, host, advertise),
    )


_OWN = (
    "side_channel_host",
    "side_channel_port",
    "side_channel_advertise_host",
    "transport",
    "transport_options",
    "backends",
    "idle_pause_s",
)


def _session(extra: Mapping[str, Any], host: str, advertise: str) -> SessionConfig:
    """Return the session's config from what is left of the extra config."""
    names = {item.name for item in fields(SessionConfig)}
    options = {NIXL_KEYS.get(key, key): value for key, value in extra.items() if key not in _OWN}
    unknown = sorted(set(options) - names)
    if unknown:
        known = sorted({*_OWN, *names, *NIXL_KEYS, *NIXL_KEYS_WITHOUT_MEANING})
        raise DescriptionError(
            f"kv_connector_extra_config has unknown key {unknown[0]!r}; known: {', '.join(known)}", field=unknown[0]
        )
    config = SessionConfig.of(options).with_environment()
    return replace(config, host=host, advertise_host=config.advertise_host or advertise)


def _first(environ: Mapping[str, str], extra: Mapping[str, Any], which: str, default: object) -> object:
    """Return the first source's value of the side channel's host or port."""
    for value in (
        environ.get(f"KVPLAN_SIDE_CHANNEL_{which}"),
        extra.get(f"side_channel_{which.lower()}"),
        environ.get(f"VLLM_NIXL_SIDE_CHANNEL_{which}"),
    ):
        if value is not None and value != "":
            return value
    return default


def _port(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise DescriptionError(f"side channel port is {value!r}, not a number", field="side_channel_port") from None


def _pause(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 0.1:
        raise DescriptionError(f"idle_pause_s is {value!r}; it must be a number in [0, 0.1]", field="idle_pause_s")
    return float(value)


def _check_reachable(host: str, advertise: str) -> None:
    """Refuse to tell peers an address that means "any"."""
    if (advertise or host) in WILDCARDS:
        raise DescriptionError(
            f"side channel host {host!r} cannot be reached by a peer; "
            "set side_channel_advertise_host to the address that peers should use",
            field="side_channel_advertise_host",
        )
