"""The side channel's sockets: a listener, a dialer, a wake-up and one bounded wait. No threads, no message's meaning.

1. ``Listener`` is a ROUTER: frames come with the route of their sender, and answers go back along it.
2. ``Dialer`` keeps one DEALER per address, made at the first send; it reconnects by itself, and says when a
   connection came up or went down.
3. ``wait`` sleeps until a socket or a ``Wakeup`` has something, or the time is over. Nothing else here blocks.

Every queue has a limit and drops when full: who sends repeats what matters. A frame that is too long, a connection
that does not speak ZeroMQ or does not finish its handshake, or one with the wrong key, is closed by ZeroMQ itself.
All objects belong to one thread at a time, except that anybody may call ``Wakeup.set``.
"""

from __future__ import annotations

import contextlib
import math
import socket
from typing import TYPE_CHECKING, NamedTuple

import zmq

from kvplan.errors import SessionError
from kvplan.wire.addresses import Address, is_wildcard
from kvplan.wire.codec import MAX_FRAME_BYTES
from kvplan.wire.doorkeeper import DOMAIN, Doorkeeper
from kvplan.wire.security import check_exposure, keyring

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from typing_extensions import Self

    Source: TypeAlias = "zmq.Socket[bytes] | Wakeup"

HIGH_WATER_MARK = 4096
"""Frames that may wait per connection and direction."""
BURST = 256
"""Frames taken from one socket before others get their turn."""
HEARTBEAT_S = 5.0
"""Time between two signs of life on an idle connection; three missed ones close it."""
HANDSHAKE_S = 5.0
"""A connection that has not finished its handshake by then is closed."""
MAX_ROUTE_BYTES = 255

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_REJECTED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_WATCHED = _UP | _REJECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Letter(NamedTuple):
    """A frame that a listener received."""

    route: bytes
    """Where an answer goes."""
    frame: bytes


class Event(NamedTuple):
    """Something that happened on a dialer's connection."""

    address: Address
    frame: bytes | None = None
    """What was received; None when the connection itself changed."""
    is_up: bool = True
    """False when the connection was lost, refused or rejected."""


class Listener:
    """Listens at ``host:port`` (port 0 takes a free one) and answers."""

    def __init__(
        self, *, host: str, port: int = 0, key: str = "", insecure: bool = False, max_bytes: int = MAX_FRAME_BYTES,
        admitted: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """``admitted``: addresses and networks that may connect; empty admits all."""
        check_exposure(host, has_key=bool(key), insecure=insecure)
        self._context = zmq.Context(1)
        self._context.set(zmq.MAX_SOCKETS, 16)
        self.socket = self._context.socket(zmq.ROUTER)
        self._doorkeeper: Doorkeeper | None = None
        try:
            clients = keyring(key).clients if key else frozenset[bytes]()
            if admitted or clients:
                self._doorkeeper = Doorkeeper(self._context, admitted, clients)
                self.socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            limit_socket(self.socket, host, max_bytes)
            self.socket.setsockopt(zmq.BACKLOG, 1024)
            if key:
                self.socket.curve_server = True
                self.socket.curve_secretkey = keyring(key).server.secret
            self.port = _bind(self.socket, host, port)
        except BaseException:
            self.close()
            raise

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], ...]:
        """What ``wait`` should watch."""
        return (self.socket,) if self._doorkeeper is None else (self.socket, self._doorkeeper.socket)

    def receive(self) -> list[Letter]:
        """Return what has arrived, at most ``BURST`` frames; malformed multipart messages are dropped."""
        if self._doorkeeper is not None:
            self._doorkeeper.answer()
        letters = []
        for _ in range(BURST):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) == 2:
                letters.append(Letter(parts[0], parts[1]))
        return letters

    def send(self, route: bytes, frame: bytes) -> bool:
        """Return whether the frame was queued; one for somebody who left or does not read is dropped."""
        try:
            self.socket.send_multipart((route, frame), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close the socket; what is still queued is dropped."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Line(NamedTuple):
    """One DEALER and the socket that reports its connection's events."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]


class Dialer:
    """Sends to any number of listeners and receives their answers."""

    def __init__(self, *, key: str = "", max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._context = zmq.Context(1)
        self._key = key
        self._max_bytes = max_bytes
        self._lines: dict[Address, _Line] = {}

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What ``wait`` should watch."""
        return [part for line in self._lines.values() for part in line]

    def send(self, address: Address, frame: bytes) -> bool:
        """Return whether the frame was queued, connecting first when there is no connection yet."""
        try:
            line = self._lines.get(address) or self._dial(address)
            line.socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> list[Event]:
        """Return what has happened on all connections, in order for each."""
        events: list[Event] = []
        for address, line in self._lines.items():
            events.extend(_frames(address, line.socket))
            events.extend(_changes(address, line.monitor))
        return events

    def hang_up(self, address: Address) -> None:
        """Close the connection; does nothing when there is none."""
        line = self._lines.pop(address, None)
        if line is not None:
            line.socket.disable_monitor()
            line.monitor.close(linger=0)
            line.socket.close(linger=0)

    def close(self) -> None:
        """Close every connection; what is still queued is dropped."""
        for address in list(self._lines):
            self.hang_up(address)
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _dial(self, address: Address) -> _Line:
        dealer = self._context.socket(zmq.DEALER)
        line = self._lines[address] = _Line(dealer, dealer.get_monitor_socket(_WATCHED))
        try:
            limit_socket(dealer, address.host, self._max_bytes)
            dealer.setsockopt(zmq.RECONNECT_IVL, 100)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            use_key(dealer, self._key, address.host)
            dealer.connect(f"tcp://{address}")
        except BaseException:
            self.hang_up(address)
            raise
        return line


class Wakeup:
    """Ends a ``wait`` of another thread. ``set`` never blocks and never raises."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reader.fileno()

    def set(self) -> None:
        """Make the present or the next ``wait`` return."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget every ``set`` so far."""
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Free the descriptors; later calls of ``set`` do nothing."""
        self._writer.close()
        self._reader.close()


def wait(sources: Sequence[Source], timeout_s: float | None) -> None:
    """Sleep until a source has something to read, or the time (in whole milliseconds, rounded up) is over."""
    poller = zmq.Poller()
    for source in sources:
        poller.register(source, zmq.POLLIN)
    poller.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000)))


def use_key(dealer: zmq.Socket[bytes], key: str, host: str) -> None:
    """Make a client socket speak with a key to a host; does nothing without one."""
    if key:
        keys = keyring(key)
        dealer.curve_serverkey = keys.server_at(host)
        dealer.curve_publickey, dealer.curve_secretkey = keys.client


def limit_socket(sock: zmq.Socket[bytes], host: str, max_bytes: int) -> None:
    """Set the limits that every socket of the side channel has."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_S * 3000))
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    sock.setsockopt(zmq.IPV6, int(":" in host))


def _bind(sock: zmq.Socket[bytes], host: str, port: int) -> int:
    where = "*" if is_wildcard(host) else f"[{host}]" if ":" in host else host
    try:
        sock.bind(f"tcp://{where}:{port or '*'}")
    except zmq.ZMQError as error:
        raise SessionError(f"the side channel cannot listen on {host}:{port}: {error}") from error
    return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _frames(address: Address, sock: zmq.Socket[bytes]) -> list[Event]:
    events = []
    for _ in range(BURST):
        try:
            parts = sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if len(parts) == 1:
            events.append(Event(address, parts[0]))
    return events


def _changes(address: Address, monitor: zmq.Socket[bytes]) -> list[Event]:
    """Return the connection's changes; a monitor message is (event as two bytes in machine order, value), endpoint."""
    events = []
    for _ in range(BURST):
        try:
            parts = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        kind = memoryview(parts[0])[:2].cast("H")[0]
        events.append(Event(address, is_up=kind == _UP))
    return events
