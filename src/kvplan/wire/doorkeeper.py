"""Doorkeeper: who may connect to a listener, by address and key. Answers what ZeroMQ asks; no messages.

The question is ZAP's (rfc.zeromq.org/spec/27): ZeroMQ asks it inside the process, before the connection may send its
first frame, and whoever is turned away learns nothing. With CURVE, ZeroMQ has by then seen the proof that the
connection has the key that it names.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from kvplan.wire.addresses import is_allowed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

logger = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"kvplan"
THIS_MACHINE = ("127.0.0.1", "::1")
MAX_QUESTIONS = 256
"""Answered at one time, before the listener's frames get their turn."""
MAX_NAMED = 64
"""Addresses turned away that are logged, once each: who is turned away tries again for ever."""


def admitted(allowed: Sequence[str], *own: str) -> tuple[str, ...]:
    """Return the rules for who may connect: an allow list and this engine itself; empty when there is no list.

    >>> admitted(["10.0.0.0/8"], "10.0.0.7"), admitted([], "10.0.0.7")
    (('10.0.0.0/8', '10.0.0.7', '127.0.0.1', '::1'), ())
    """
    return (*allowed, *own, *THIS_MACHINE) if allowed else ()


class Doorkeeper:
    """Admits connections from some addresses and with some keys. Belongs to the listener's context and thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], rules: Iterable[str], clients: frozenset[bytes] = frozenset()
    ) -> None:
        """Names among the rules are looked up here, once. No rules, or no clients' public keys, admit all."""
        self._clients = clients
        self._rules = tuple(address for rule in rules for address in _addresses(rule))
        self._named: set[str] = set()
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ENDPOINT)

    def answer(self) -> None:
        """Answer the connections that wait."""
        for _ in range(MAX_QUESTIONS):
            try:
                version, number, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            admits = self._knows(mechanism, credentials) and self._admits(address.decode("ascii", errors="replace"))
            verdict = (b"200", b"welcome") if admits else (b"400", b"not on the allow list")
            self.socket.send_multipart((version, number, *verdict, b"", b""))

    def _knows(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        if not self._clients:
            return True
        return mechanism == b"CURVE" and len(credentials) == 1 and z85.encode(credentials[0]) in self._clients

    def _admits(self, address: str) -> bool:
        address = address.removeprefix("::ffff:")
        if is_allowed(address, self._rules):
            return True
        if address not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(address)
            logger.warning("a connection from %s was turned away: it is not on the allow list (allowed_peers)", address)
        return False


def _addresses(rule: str) -> set[str]:
    """Return a rule as addresses and networks; a name that means nothing admits nobody, and is logged."""
    if "/" in rule:
        return {rule}
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(rule, None, proto=socket.IPPROTO_TCP)}
    except OSError as error:
        logger.warning("allowed_peers: %s means no address here (%s): nobody is admitted by it", rule, error)
        return {rule}
