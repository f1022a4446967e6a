"""The router as an ASGI application: paths and health. How one request is served stands in `relay`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvplan.proxy.relay import Relay
from kvplan.proxy.upstreams import Upstreams

__all__ = ["COMPLETION_PATHS", "build_app"]

COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")

_CONNECT_TIMEOUT_S = 5.0


def build_app(prefill: Sequence[str], decode: Sequence[str], *, max_body_bytes: int = 64 << 20) -> Starlette:
    """A router for these prefill and decode engines, taken in turn.

    `/health` is 200 while at least one engine of each role is healthy, else 503; it names each engine.
    """
    prefills, decodes = Upstreams("prefill", prefill), Upstreams("decode", decode)
    # A generation may take long, so reading has no limit; the engine or the client ends it. No proxies of the
    # environment: engines are addressed directly.
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0),
        trust_env=False,
    )

    @asynccontextmanager
    async def close_at_end(app: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    async def health(request: Request) -> Response:
        state = {engines.role: await engines.health(client) for engines in (prefills, decodes)}
        usable = all(any(engines.values()) for engines in state.values())
        return JSONResponse(state, 200 if usable else 503)

    async def models(request: Request) -> Response:
        for url in decodes.in_turn():
            try:
                answer = await client.get(f"{url}/v1/models", timeout=_CONNECT_TIMEOUT_S)
            except httpx.HTTPError:
                continue
            return Response(answer.content, answer.status_code, media_type="application/json")
        return JSONResponse({"error": {"message": "no decode engine can be reached"}}, 503)

    relays = [
        Route(path, Relay(path, prefills, decodes, client, max_body_bytes=max_body_bytes), methods=["POST"])
        for path in COMPLETION_PATHS
    ]
    routes = [Route("/health", health), Route("/v1/models", models), *relays]
    return Starlette(routes=routes, lifespan=close_at_end)
