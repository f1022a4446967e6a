"""What stands between two engines and does harm: to frames (loses, repeats, remembers them), or to raw bytes.

A producer that advertises ``HOST`` and listens on 127.0.0.1 is reached through whoever listens on ``HOST``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading

from kvplan.wire.addresses import Address
from kvplan.wire.codec import decode, encode
from kvplan.wire.messages import HelloRequest, NotReady
from kvplan.wire.side_channel import Dialer, Listener, Wakeup, wait
from tests.session.engines import wait_until

HOST = "127.0.0.2"


class Middleman:
    """Passes frames on between readers and one listener; ``copies`` says how often the next of a kind arrive."""

    def __init__(self, to, *, port=0):
        self.to = to
        self.copies = {}
        self.passed = []
        """Frames that went towards the listener, as they were sent: (kind, frame)."""
        self._listener = Listener(host=HOST, port=port or to.port)
        self.port = self._listener.port
        self._lines = {}
        self._wakeup = Wakeup()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self):
        self._stopping.set()
        self._wakeup.set()
        self._thread.join()
        for line in self._lines.values():
            line.close()
        self._listener.close()
        self._wakeup.close()

    def _run(self):
        while not self._stopping.is_set():
            lines = [part for line in self._lines.values() for part in line.sockets]
            wait([self._listener.socket, self._wakeup, *lines], 0.5)
            for letter in self._listener.receive():
                line = self._lines.get(letter.route) or Dialer()
                self._lines[letter.route] = line
                for _ in range(self._wanted(letter.frame, remember=True)):
                    line.send(self.to, letter.frame)
            for route, line in self._lines.items():
                for frame in [event.frame for event in line.receive() if event.frame is not None]:
                    for _ in range(self._wanted(frame)):
                        self._listener.send(route, frame)

    def _wanted(self, frame, *, remember=False):
        kind = type(decode(frame)).__name__
        if remember:
            self.passed.append((kind, frame))
        count = self.copies.get(kind, 1)
        if callable(count):
            return count()
        return count


class Wiretap:
    """Passes bytes on between connections and one listener, and keeps what went towards the listener."""

    def __init__(self, to, *, port=0):
        self.to = to
        self.heard = []
        """By connection, everything that was sent."""
        self._server = socket.create_server((HOST, port or to.port))
        self.address = Address(HOST, self._server.getsockname()[1])
        self._sockets = [self._server]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self):
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _accept(self):
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(self.to)
            except OSError:
                return
            heard = bytearray()
            self.heard.append(heard)
            self._sockets += [near, far]
            for pair in ((near, far, heard), (far, near, bytearray())):
                self._threads.append(threading.Thread(target=self._pump, args=pair))
                self._threads[-1].start()

    @staticmethod
    def _pump(source, sink, heard):
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                heard += part
                sink.sendall(part)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def connect(address):
    """Return a raw connection whose end leaves nothing behind in the system's tables."""
    raw = socket.create_connection(address)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return raw


def noise():
    """Frames that are none of ours, or of another version, or cut short."""
    whole = encode(HelloRequest(engine_id="x" * 200))
    return [b"", b"\0", os.urandom(1 << 20), b"KVPL\x00\x09newer", b"KVPL\x00\x01" + os.urandom(1000), b"KVPL",
            encode(NotReady()), b"\x80\x04\x95pickle", b"KVPL\x00\x00" + os.urandom(50),
            *(whole[: len(whole) * part // 5] for part in range(1, 5))]  # fmt: skip


def pester(address):
    """Send noise to a listener, as raw bytes and as frames; return when something has been answered."""
    with connect(address) as raw, contextlib.suppress(OSError):
        raw.sendall(os.urandom(1 << 20))
    with Dialer() as dialer:
        for frame in noise():
            dialer.send(address, frame)
        wait_until(lambda: wait(dialer.sockets, 0.05) or any(e.frame for e in dialer.receive()))
