"""Asking live engines from outside: one question, one answer, a bounded wait, and a sentence when that does not work.

For tools that people run, not for sessions (those have ``Dialer`` and never wait). What a person must know is told
apart:

1. nobody listens, or the name is none;
2. something listens that is no side channel;
3. it is one, and the keys differ, or one side has a key and the other none;
4. it hears us and does not answer, answers that it is not ready, or speaks another protocol version.

A failed handshake alone does not say which: who closes first decides what the other sees. So the listener's greeting
is looked at then, which names its security mechanism before any is used (ZMTP 3.0, rfc.zeromq.org/spec/23).
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from kvplan.errors import ProtocolVersionError, UnavailableError, WireError
from kvplan.wire.codec import MAX_FRAME_BYTES, decode, encode
from kvplan.wire.messages import Error, HelloRefused, NotReady
from kvplan.wire.side_channel import limit_socket, use_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from kvplan.wire.addresses import Address
    from kvplan.wire.messages import Message

DEFAULT_PORT = 5600
_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
_GREETING_S = 1.0
"""How long a listener's greeting is waited for."""
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""Signature and version of a greeting, after which the other side states its mechanism."""


@dataclass(slots=True)
class _Line:
    """A connection, and how far it is."""

    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    stage: int = 0
    """The last of CONNECTED and HANDSHAKE_SUCCEEDED that happened; 0 for neither."""


class Asker:
    """Keeps a connection to everybody that was asked, until one fails or all are closed. For one thread."""

    def __init__(self, *, key: str = "", max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._key = key
        self._max_bytes = max_bytes
        self._context = zmq.Context(1)
        self._lines: dict[Address, _Line] = {}

    def ask(self, address: Address, question: Message, *, timeout_s: float = 5.0) -> Message:
        """Return the answer. Raises ``UnavailableError`` with a sentence when there is none."""
        answer = self.ask_all({address: question}, timeout_s=timeout_s)[address]
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    def ask_all(
        self, questions: Mapping[Address, Message], *, timeout_s: float = 5.0
    ) -> dict[Address, Message | UnavailableError]:
        """Ask everybody at once; return each one's answer, or why there is none."""
        answers: dict[Address, Message | UnavailableError] = {}
        for address, question in questions.items():
            try:
                self._send(address, encode(question))
            except UnavailableError as error:
                answers[address] = error
        ends_at = time.monotonic() + timeout_s
        while len(answers) < len(questions):
            left_s = ends_at - time.monotonic()
            waiting = [address for address in questions if address not in answers]
            if left_s <= 0:
                answers |= {address: self._overdue(address, timeout_s) for address in waiting}
                break
            self._wait(waiting, left_s)
            for address in waiting:
                answer = self._look(address)
                if answer is not None:
                    answers[address] = answer
        for address, answer in answers.items():
            if isinstance(answer, UnavailableError):
                self._hang_up(address)
        return answers

    def close(self) -> None:
        """Hang up everywhere. Idempotent."""
        for address in list(self._lines):
            self._hang_up(address)
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, address: Address, frame: bytes) -> None:
        line = self._lines.get(address) or self._dial(address)
        while line.dealer.poll(0, zmq.POLLIN):
            line.dealer.recv_multipart()  # the late answer to an earlier question
        try:
            line.dealer.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise UnavailableError(f"{address}: {error}", address=str(address), why="silent") from None

    def _dial(self, address: Address) -> _Line:
        try:
            socket.getaddrinfo(address.host, address.port)
        except OSError:
            text = f"{address}: there is no host of that name"
            raise UnavailableError(text, address=str(address), why="unreachable") from None
        dealer = self._context.socket(zmq.DEALER)
        line = self._lines[address] = _Line(dealer, dealer.get_monitor_socket(_WATCHED))
        limit_socket(dealer, address.host, self._max_bytes)
        use_key(dealer, self._key, address.host)
        dealer.connect(f"tcp://{address}")
        return line

    def _hang_up(self, address: Address) -> None:
        line = self._lines.pop(address, None)
        if line is not None:
            line.dealer.disable_monitor()
            line.monitor.close(linger=0)
            line.dealer.close(linger=0)

    def _wait(self, addresses: list[Address], timeout_s: float) -> None:
        poller = zmq.Poller()
        for address in addresses:
            poller.register(self._lines[address].dealer, zmq.POLLIN)
            poller.register(self._lines[address].monitor, zmq.POLLIN)
        poller.poll(max(1, int(timeout_s * 1000)))

    def _look(self, address: Address) -> Message | UnavailableError | None:
        """Return the answer that is here, or why there will be none."""
        line = self._lines[address]
        if line.dealer.poll(0, zmq.POLLIN):
            return _understood(address, line.dealer.recv_multipart()[-1], self._max_bytes)
        while line.monitor.poll(0, zmq.POLLIN):
            head = line.monitor.recv_multipart()[0]
            event = int.from_bytes(head[:2], sys.byteorder)
            if event in {zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED}:
                line.stage = event
            elif event != zmq.EVENT_CONNECT_RETRIED or line.stage == 0:
                why = "unreachable" if line.stage == 0 else self._why_closed(address, line.stage)
                return UnavailableError(f"{address}: {SENTENCES[why]}", address=str(address), why=why)
        return None

    def _why_closed(self, address: Address, stage: int) -> str:
        """Return what it means that a connection was made, and ended."""
        if stage == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "closed"
        mechanism = _mechanism(address)
        if mechanism == "CURVE":
            return "other key" if self._key else "key needed"
        if mechanism == "NULL":
            return "key refused" if self._key else "closed"
        return "no side channel"

    def _overdue(self, address: Address, timeout_s: float) -> UnavailableError:
        stage = self._lines[address].stage
        why = {0: "no connection", zmq.EVENT_HANDSHAKE_SUCCEEDED: "silent"}.get(stage, "no side channel")
        text = f"{address}: {SENTENCES[why]} (waited {timeout_s:g} s)"
        return UnavailableError(text, address=str(address), why=why)


SENTENCES = {
    "unreachable": "nobody listens there; is the engine running, and is this the port of its side channel "
    f"(default {DEFAULT_PORT})?",
    "no connection": "the host does not answer; is the address right, and the port open in firewalls?",
    "no side channel": "something listens there that is not a kvplan side channel; is it the port of the HTTP API? "
    f"(the side channel's default is {DEFAULT_PORT})",
    "key needed": "the engine's side channel needs a key; give --key, or set KVPLAN_SIDE_CHANNEL_KEY",
    "key refused": "the engine's side channel has no key, and one was given; leave --key and KVPLAN_SIDE_CHANNEL_KEY "
    "away, or start the engine with it",
    "other key": "the key is not accepted; the engine was started with another KVPLAN_SIDE_CHANNEL_KEY",
    "closed": "the connection was closed; has the engine just ended?",
    "silent": "connected, but there is no answer; is the process stopped or overloaded, or its kvplan older than this?",
}
"""What a person reads, by what is wrong."""


def _mechanism(address: Address) -> str:
    """Return the security mechanism that a listener greets with; empty for something that is no ZeroMQ listener."""
    greeting = b""
    with suppress(OSError), socket.create_connection(address, timeout=_GREETING_S) as line:
        line.sendall(_GREETING)
        for _ in range(4):  # it comes in two or three parts
            greeting += line.recv(64) if len(greeting) < 32 else b""
    is_greeting = len(greeting) >= 32 and greeting[0] == 0xFF and greeting[9] == 0x7F
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace") if is_greeting else ""


def _understood(address: Address, frame: bytes, max_bytes: int) -> Message | UnavailableError:
    """Return the message in a frame, or why it is no answer."""
    at = str(address)
    try:
        message = decode(frame, max_bytes=max_bytes)
    except ProtocolVersionError as error:
        return UnavailableError(
            f"{address}: {error}; install kvplan of the same release on both sides", address=at, why="protocol"
        )
    except WireError as error:
        return UnavailableError(f"{address}: the answer is no message of kvplan: {error}", address=at, why="protocol")
    if isinstance(message, NotReady):
        return UnavailableError(f"{address}: not ready: {message.detail}; ask again", address=at, why="not ready")
    if isinstance(message, HelloRefused | Error):
        return UnavailableError(f"{address}: refused: {message.reason}: {message.detail}", address=at, why="refused")
    return message
