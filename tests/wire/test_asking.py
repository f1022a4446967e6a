"""Asking from outside: an answer, or a sentence that says what is wrong; never a hang, never silence."""

import http.server
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from kvplan.errors import UnavailableError
from kvplan.wire.addresses import Address
from kvplan.wire.asking import Asker
from kvplan.wire.codec import encode, refuse_version
from kvplan.wire.messages import Error, HelloRequest, NotReady
from kvplan.wire.side_channel import Listener, Wakeup, wait
from kvplan.wire.status import Status, StatusRequest

KEY, OTHER_KEY = "a shared key of the cluster", "the key of another cluster"
STATUS = Status(role="rank", engine_id="prefill-0")


@contextmanager
def answering(frame=None, *, key="", port=0):
    """A side channel that answers every frame with this one, or not at all."""
    stop, wakeup = threading.Event(), Wakeup()
    with Listener(host="127.0.0.1", key=key, port=port) as listener:

        def serve():
            while not stop.is_set():
                wait([listener.socket, wakeup], 5.0)
                for letter in listener.receive():
                    if frame is not None:
                        listener.send(letter.route, frame)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address("127.0.0.1", listener.port)
        finally:
            stop.set()
            wakeup.set()
            thread.join()
            wakeup.close()


@contextmanager
def listening_otherwise(*, close=False):
    """A TCP port where something else answers: nothing, or an end at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        held = []

        def serve():
            try:
                held.append(server.accept()[0])
                if close:
                    held.pop().close()
            except OSError:
                pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield Address("127.0.0.1", server.getsockname()[1])
        thread.join()
        for connection in held:
            connection.close()


def refusal(address, *, key="", timeout_s=3.0):
    began_at = time.monotonic()
    with Asker(key=key) as asker, pytest.raises(UnavailableError) as caught:
        asker.ask(address, StatusRequest(), timeout_s=timeout_s)
    assert time.monotonic() - began_at < timeout_s + 1.0
    assert str(caught.value).startswith(str(address))
    assert caught.value.address == str(address)
    return caught.value


@pytest.mark.parametrize("key", ["", KEY], ids=["plain", "encrypted"])
def test_an_answer_is_returned(key):
    with answering(encode(STATUS), key=key) as address, Asker(key=key) as asker:
        assert asker.ask(address, StatusRequest()) == STATUS
        assert asker.ask(address, HelloRequest()) == STATUS


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
    error = refusal(address)
    assert error.why == "unreachable"
    assert "nobody listens" in str(error)


def test_a_name_that_is_none():
    assert "no host of that name" in str(refusal(Address("no-such-host.invalid", 5600)))


@pytest.mark.parametrize(
    "ours, theirs, why",
    [("", KEY, "key needed"), (KEY, "", "key refused"), (OTHER_KEY, KEY, "other key")],
    ids=["no key", "a key too much", "another key"],
)
def test_keys_that_differ(ours, theirs, why):
    with answering(encode(STATUS), key=theirs) as address:
        error = refusal(address, key=ours)
    assert error.why == why
    assert "key" in str(error)
    assert KEY not in str(error)
    assert OTHER_KEY not in str(error)


def test_something_that_says_nothing_is_no_side_channel():
    with listening_otherwise() as address:
        assert refusal(address, timeout_s=0.5).why == "no side channel"


def test_something_that_hangs_up_is_no_side_channel():
    with listening_otherwise(close=True) as address:
        assert refusal(address).why == "no side channel"


def test_the_port_of_an_http_api_is_no_side_channel():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        error = refusal(Address("127.0.0.1", server.server_port), timeout_s=1.0)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert error.why == "no side channel"
    assert "HTTP API" in str(error)


def test_no_answer():
    with answering(None) as address:
        error = refusal(address, timeout_s=0.5)
    assert error.why == "silent"
    assert "no answer" in str(error)


@pytest.mark.parametrize(
    "frame, why, words",
    [
        (encode(NotReady(detail="loading")), "not ready", "not ready: loading"),
        (encode(Error(reason="unexpected", detail="not here")), "refused", "unexpected: not here"),
        (refuse_version(1), "protocol", "protocol version"),
        (b"KVPL\0\x09rest", "protocol", "protocol version 9"),
        (b"HTTP/1.1 400 Bad Request", "protocol", "no message of kvplan"),
    ],
    ids=["not ready", "error", "version refused", "newer version", "noise"],
)
def test_answers_that_are_none(frame, why, words):
    with answering(frame) as address:
        error = refusal(address)
    assert error.why == why
    assert words in str(error)


def test_everybody_is_asked_at_once_and_one_that_fails_costs_the_others_nothing():
    with answering(encode(STATUS)) as good, answering(None) as silent, Asker() as asker:
        answers = asker.ask_all({good: StatusRequest(), silent: StatusRequest()}, timeout_s=0.5)
        assert answers[good] == STATUS
        assert isinstance(answers[silent], UnavailableError)


def test_an_engine_that_comes_back_on_its_port_is_found_again():
    with Asker() as asker:
        with answering(encode(STATUS)) as address:
            assert asker.ask(address, StatusRequest()) == STATUS
        with pytest.raises(UnavailableError):
            asker.ask(address, StatusRequest(), timeout_s=1.0)
        with answering(encode(STATUS), port=address.port):
            assert asker.ask(address, StatusRequest(), timeout_s=5.0) == STATUS
