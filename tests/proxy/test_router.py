"""The router between stand-in engines: what it sends, streams, passes over and cancels. No vLLM here."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from kvplan.errors import DescriptionError
from kvplan.proxy import build_app, serve_in_thread
from tests.proxy.engines import TRANSFER, StandIn


@contextmanager
def router(prefill, decode):
    with ExitStack() as stack:
        urls = [
            [one if isinstance(one, str) else stack.enter_context(one.running()) for one in side]
            for side in (prefill, decode)
        ]
        yield stack.enter_context(serve_in_thread(build_app(*urls), host="127.0.0.1", port=0))


@pytest.fixture
def nobody():
    """A URL where nothing listens, for as long as the test runs."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


def post(url, path="/v1/completions", **body):
    return httpx.post(url + path, json={"model": "tiny", "prompt": [7, 8], "max_tokens": 9} | body, timeout=10)


def until(true, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_one_request_passes_through_both(path):
    p, d = StandIn(), StandIn()
    with router([p], [d]) as url:
        answer = post(url, path, min_tokens=4, max_completion_tokens=9)
    assert answer.json()["choices"] == [{"text": "whole"}]
    assert p.asked == [
        {
            "model": "tiny",
            "prompt": [7, 8],
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "stream": False,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
    ]
    assert d.asked == [
        {
            "model": "tiny",
            "prompt": [7, 8],
            "max_tokens": 9,
            "min_tokens": 4,
            "max_completion_tokens": 9,
            "kv_transfer_params": TRANSFER,
        }
    ]
    assert p.request_ids == d.request_ids != [""]


def test_the_clients_own_transfer_parameters_are_not_believed():
    p, d = StandIn(), StandIn()
    with router([p], [d]) as url:
        post(url, kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1"})
    assert p.asked[0]["kv_transfer_params"]["remote_host"] is None
    assert d.asked[0]["kv_transfer_params"] == TRANSFER


def test_pieces_arrive_as_they_are_made():
    p, d = StandIn(), StandIn(delay_s=0.2, num_pieces=4)
    with (
        router([p], [d]) as url,
        httpx.stream("POST", url + "/v1/completions", json={"prompt": "a", "stream": True}) as s,
    ):
        lines = [(line, d.sent) for line in s.iter_lines() if line]
    assert s.headers["content-type"].startswith("text/event-stream")
    assert [line for line, _ in lines][-1] == "data: [DONE]"
    assert lines[0][1] < 4
    assert p.asked[0]["stream"] is False


def test_engines_take_turns():
    prefills, decodes = [StandIn(), StandIn()], [StandIn(), StandIn(), StandIn()]
    with router(prefills, decodes) as url:
        for _ in range(6):
            post(url)
    assert [len(one.asked) for one in prefills] == [3, 3]
    assert [len(one.asked) for one in decodes] == [2, 2, 2]


def test_an_engine_that_cannot_be_reached_is_passed_over(nobody):
    p, d = StandIn(), StandIn()
    with router([nobody, p], [nobody, d]) as url:
        assert [post(url).status_code for _ in range(4)] == [200] * 4
    assert len(p.asked) == len(d.asked) == 4


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_no_engine_of_a_role_is_503_that_names_it(nobody, missing):
    p, d = ([nobody], [StandIn()]) if missing == "prefill" else ([StandIn()], [nobody])
    with router(p, d) as url:
        answer = post(url)
    assert answer.status_code == 503
    assert missing in answer.json()["error"]["message"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engines_error_reaches_the_client(role):
    p, d = StandIn(status=422 if role == "prefill" else 200), StandIn(status=500 if role == "decode" else 200)
    with router([p], [d]) as url:
        answer = post(url)
    assert answer.status_code == (422 if role == "prefill" else 500)
    assert answer.json()["error"]["message"] == "engine says no"
    assert len(d.asked) == (0 if role == "prefill" else 1)


@pytest.mark.parametrize("phase", ["prefill", "decode", "decode-streaming"])
def test_a_client_that_leaves_ends_the_work(phase):
    slow = StandIn(delay_s=30.0)
    p, d = (slow, StandIn()) if phase == "prefill" else (StandIn(), slow)
    with router([p], [d]) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                url + "/v1/completions", json={"prompt": "a", "stream": phase == "decode-streaming"}, timeout=0.5
            )
        assert until(lambda: slow.cancelled == 1)
    if phase == "prefill":
        assert d.asked == []


def test_an_answer_that_breaks_off_is_not_passed_on_as_a_whole_one():
    """The engine's connection ends in the middle of a chunked answer; so does the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_half, args=(listener,))
        thread.start()
        decode = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            router([StandIn()], [decode]) as url,
            httpx.stream("POST", url + "/v1/completions", json={"prompt": "a", "stream": True}) as s,
        ):
            pieces = s.iter_bytes()
            assert next(pieces) == b"data: 0\n\n"
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        thread.join(5)


def _answer_half(listener):
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + b"9\r\ndata: 0\n\n\r\n")
        time.sleep(0.2)  # let the first piece travel on its own


@pytest.mark.parametrize(
    "body", [{"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"echo": True}, {"prompt_logprobs": 0}]
)
def test_what_one_transfer_cannot_serve_goes_to_decode_alone(body):
    p, d = StandIn(), StandIn()
    with router([p], [d]) as url:
        assert post(url, **body).status_code == 200
    assert p.asked == []
    assert "kv_transfer_params" not in d.asked[0]


@pytest.mark.parametrize(("content", "status"), [(b"{", 400), (b"[1]", 400), (b"\xff", 400)])
def test_a_body_that_is_no_request_is_refused(content, status):
    with router([StandIn()], [StandIn()]) as url:
        assert httpx.post(url + "/v1/completions", content=content).status_code == status


def test_a_body_that_is_too_large_is_refused():
    p = StandIn()
    with p.running() as engine:
        app = build_app([engine], [engine], max_body_bytes=100)
        with serve_in_thread(app, host="127.0.0.1", port=0) as url:
            assert post(url, prompt="a" * 200).status_code == 413
    assert p.asked == []


def test_health_names_every_engine(nobody):
    with router([StandIn(), nobody], [StandIn()]) as url:
        answer = httpx.get(url + "/health")
        assert answer.status_code == 200
        assert sorted(answer.json()["prefill"].values()) == [False, True]
    with router([nobody], [StandIn()]) as url:
        assert httpx.get(url + "/health").status_code == 503


def test_models_come_from_a_decode_engine(nobody):
    with router([StandIn()], [nobody, StandIn()]) as url:
        assert httpx.get(url + "/v1/models").json() == {"data": [{"id": "tiny"}]}


@pytest.mark.parametrize("urls", [[], ["127.0.0.1:8000"]])
def test_a_router_without_engines_is_refused_by_name(urls):
    with pytest.raises(DescriptionError, match="prefill engine"):
        build_app(urls, ["http://127.0.0.1:8000"])
