"""One client request through a prefill and a decode engine. Which engines there are stands in `upstreams`.

1. The prefill engine computes the prompt and answers with `kv_transfer_params`. An engine that cannot be reached is
   passed over; an error that it answers goes to the client as it is.
2. The decode engine gets the request with these parameters; its answer goes to the client piece by piece as it comes.
3. Whatever happens first ends the other: when the client leaves, the connection to the engine that works for it is
   closed, and the engine stops. When an engine breaks off in the middle of an answer, the client's connection breaks
   off too: a truncated answer never looks like a whole one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kvplan.proxy.bodies import decode_body, is_for_decode_alone, prefill_body
from kvplan.proxy.upstreams import Upstreams

__all__ = ["Relay"]

log = logging.getLogger(__name__)

_FORWARDED = ("authorization", "x-request-id", "traceparent", "tracestate")


class Relay:
    """The ASGI endpoint of one path, `/v1/completions` for example."""

    def __init__(
        self, path: str, prefill: Upstreams, decode: Upstreams, client: httpx.AsyncClient, *, max_body_bytes: int
    ) -> None:
        self._path = path
        self._prefill = prefill
        self._decode = decode
        self._client = client
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, and stops serving it when its client leaves."""
        request = Request(scope, receive)
        try:
            body = await _read_json(request, self._max_body_bytes)
        except ClientDisconnect:
            return
        except _AnswerError as error:
            await error.response()(scope, receive, send)
            return
        await _until_client_leaves(receive, self._serve(body, _headers(request), scope, receive, send))

    async def _serve(
        self, body: dict[str, Any], headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            transfer = None if is_for_decode_alone(body) else await self._ask_prefill(prefill_body(body), headers)
            response = await self._ask_decode(decode_body(body, transfer), headers)
        except _AnswerError as error:
            await error.response()(scope, receive, send)
            return
        try:
            await _pass_on(response, send)
        except httpx.HTTPError as error:
            # Returning without the last piece makes the server close the client's connection.
            log.warning("decode engine broke off in the middle of an answer: %r", error)
        finally:
            await response.aclose()

    async def _ask_prefill(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any] | None:
        response = await self._first_reached(self._prefill, body, headers, stream=False)
        if response.status_code != httpx.codes.OK:
            raise _AnswerError(response.status_code, response.content)
        try:
            transfer = response.json().get("kv_transfer_params")
        except (ValueError, AttributeError):
            raise _AnswerError.of(502, f"{response.url} answered something else than a completion") from None
        return transfer if isinstance(transfer, dict) else None

    async def _ask_decode(self, body: dict[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        return await self._first_reached(self._decode, body, headers, stream=True)

    async def _first_reached(
        self, engines: Upstreams, body: dict[str, Any], headers: Mapping[str, str], *, stream: bool
    ) -> httpx.Response:
        """The answer of the first engine, in turn, that takes the request. One that took it is not passed over."""
        for url in engines.in_turn():
            request = self._client.build_request("POST", f"{url}{self._path}", json=body, headers=headers)
            try:
                return await self._client.send(request, stream=stream)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                log.warning("%s engine %s cannot be reached: %s", engines.role, url, error)
            except httpx.HTTPError as error:
                raise _AnswerError.of(502, f"{engines.role} engine {url} broke off: {error!r}") from error
        raise _AnswerError.of(503, f"no {engines.role} engine can be reached: {', '.join(engines.urls)}")


@dataclass
class _AnswerError(Exception):
    """Ends a request with this answer to the client."""

    status: int
    content: bytes

    @classmethod
    def of(cls, status: int, message: str) -> _AnswerError:
        error = {"message": message, "type": "router_error", "code": status}
        return cls(status, json.dumps({"error": error}).encode())

    def response(self) -> JSONResponse:
        try:
            return JSONResponse(json.loads(self.content), self.status)
        except ValueError:
            return JSONResponse({"error": {"message": self.content.decode(errors="replace")}}, self.status)


async def _read_json(request: Request, max_body_bytes: int) -> dict[str, Any]:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > max_body_bytes:
            raise _AnswerError.of(413, f"the request's body is larger than {max_body_bytes} bytes")
    try:
        body = json.loads(bytes(content))
    except ValueError as error:
        raise _AnswerError.of(400, f"the request's body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise _AnswerError.of(400, "the request's body is not a JSON object")
    return body


def _headers(request: Request) -> dict[str, str]:
    headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
    headers.setdefault("x-request-id", uuid.uuid4().hex)
    return headers


async def _pass_on(response: httpx.Response, send: Send) -> None:
    kind = response.headers.get("content-type", "application/json").encode("latin-1")
    await send({"type": "http.response.start", "status": response.status_code, "headers": [(b"content-type", kind)]})
    async for piece in response.aiter_bytes():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_client_leaves(receive: Receive, work: Any) -> None:
    """Runs `work` to its end, or cancels it when the client has left."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        with suppress(asyncio.CancelledError):
            await working


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
