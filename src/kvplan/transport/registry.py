"""Transports by name: finds and builds them, imports a carrier only when it is asked for; holds no carrier."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvplan.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.transport.base import Transport


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    attribute: str

    def load(self) -> Callable[..., Transport]:
        factory: Callable[..., Transport] = getattr(import_module(self.module), self.attribute)
        return factory


_KNOWN: dict[str, Callable[[], Callable[..., Transport]]] = {
    "cma": _Entry("kvplan.transport.cma", "CmaTransport").load,
    "memory": _Entry("kvplan.transport.memory", "MemoryTransport").load,
    "nixl": _Entry("kvplan.transport.nixl", "NixlTransport").load,
}


def known_transports() -> tuple[str, ...]:
    """Return the names that `create` takes, sorted.

    >>> known_transports()
    ('cma', 'memory', 'nixl')
    """
    return tuple(sorted(_KNOWN))


def add_transport(name: str, factory: Callable[..., Transport]) -> None:
    """Make a transport of your own known to `create` under ``name``, in this process."""
    if name in _KNOWN:
        raise UnsupportedError(f"a transport named {name!r} is known already")
    _KNOWN[name] = lambda: factory


def create(name: str, **options: Any) -> Transport:
    """Return a new transport. ``options`` are the keyword arguments of its class.

    Raises UnsupportedError for an unknown name or option, and for a package that is not installed.
    """
    if name not in _KNOWN:
        raise UnsupportedError(f"unknown transport {name!r}; known: {', '.join(known_transports())}")
    factory = _KNOWN[name]()
    allowed = inspect.signature(factory).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in allowed.values())
    unknown = sorted(options.keys() - allowed.keys())
    if unknown and not takes_any:
        raise UnsupportedError(
            f"transport {name!r} has no option {', '.join(unknown)}; known options: {', '.join(allowed) or 'none'}"
        )
    return factory(**options)
