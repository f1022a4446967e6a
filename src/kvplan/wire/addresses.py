"""Host and port of a peer: parsing, and which may be advertised, reached or trusted. No sockets.

>>> parse_address("[::1]:5600")
Address(host='::1', port=5600)
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, NamedTuple

from kvplan.errors import DescriptionError, WireError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Address(NamedTuple):
    """Where a side channel listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return host and port; raises ``WireError`` for anything that cannot be connected to."""
    host, separator, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not separator or not port.isascii() or not port.isdigit():
        raise WireError(f"address {text!r} is not host:port")
    return checked_address(host, int(port))


def checked_address(host: str, port: int) -> Address:
    """Return the address if it can be connected to; raises ``WireError`` otherwise."""
    if not 0 < port < 65536:
        raise WireError(f"port {port} is not in [1, 65535]")
    if not host or len(host) > 255 or not all(c.isalnum() or c in ".-_:%" for c in host):
        raise WireError(f"host {host!r} is not a name or an address")
    return Address(host, port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host.

    >>> is_loopback("127.0.0.2"), is_loopback("localhost"), is_loopback("10.1.2.3")
    (True, True, False)
    """
    address = _ip(host)
    return host == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """Return whether the host means "every interface", which can be bound but not connected to."""
    address = _ip(host)
    return host in {"", "*"} if address is None else address.is_unspecified


def check_advertised(control: Address, *, reached: str) -> None:
    """Refuse a control address that a peer reached at ``reached`` cannot mean: a wildcard, or its own loopback."""
    if is_wildcard(control.host):
        raise WireError(f"the peer at {reached} advertises {control}, which no one can connect to; set advertise_host")
    if is_loopback(control.host) and not is_loopback(reached):
        raise WireError(f"the peer at {reached} advertises {control}, which is this machine; set its host to {reached}")


def is_allowed(host: str, allowed: Iterable[str]) -> bool:
    """Return whether the host is one of the allowed names, addresses or networks; nothing listed allows all.

    >>> is_allowed("10.1.2.3", ["10.0.0.0/8"]), is_allowed("11.1.2.3", ["10.0.0.0/8"]), is_allowed("any", [])
    (True, False, True)
    """
    rules = tuple(allowed)
    if not rules or host in rules:
        return True
    address = _ip(host)
    return address is not None and any(address in network for network in map(_network, rules) if network is not None)


def check_allow_list(allowed: Iterable[str]) -> None:
    """Raise ``DescriptionError`` for a rule that looks like a network and is none."""
    for rule in allowed:
        if "/" in rule and _network(rule) is None:
            raise DescriptionError(f"allowed_peers: {rule!r} is not a network; write for example 10.0.0.0/8")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _network(rule: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(rule, strict=False)
    except ValueError:
        return None
