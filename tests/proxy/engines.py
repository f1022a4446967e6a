"""Stand-ins for prefill and decode engines: ASGI applications that remember what they were asked. No tests here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvplan.proxy import COMPLETION_PATHS, serve_in_thread

TRANSFER = {"do_remote_prefill": True, "remote_engine_id": "p-1", "remote_port": 5600, "kvplan": {"generation": "g"}}


@dataclass
class StandIn:
    """One engine that answers at once, slowly, with an error, or breaks off."""

    status: int = 200
    delay_s: float = 0.0
    num_pieces: int = 3
    breaks_off: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    cancelled: int = 0
    sent: int = 0

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.request_ids.append(request.headers.get("x-request-id", ""))
        if self.status != 200:
            return JSONResponse({"error": {"message": "engine says no"}}, self.status)
        if body.get("stream"):
            return StreamingResponse(self._pieces(), media_type="text/event-stream")
        await self._wait(request)
        wants_cache_kept = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        answer = {"choices": [{"text": "whole"}], "kv_transfer_params": TRANSFER if wants_cache_kept else None}
        return JSONResponse(answer)

    async def _wait(self, request: Request) -> None:
        waited = 0.0
        while waited < self.delay_s:
            if await request.is_disconnected():
                self.cancelled += 1
                return
            await asyncio.sleep(0.01)
            waited += 0.01

    async def _pieces(self) -> Any:
        try:
            for number in range(self.num_pieces):
                yield f"data: {json.dumps({'piece': number})}\n\n".encode()
                self.sent += 1
                await asyncio.sleep(self.delay_s)
            if self.breaks_off:
                return
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def health(self, request: Request) -> Response:
        return Response(status_code=self.status)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "tiny"}]})

    @contextmanager
    def running(self) -> Iterator[str]:
        completions = [Route(path, self.complete, methods=["POST"]) for path in COMPLETION_PATHS]
        routes = [*completions, Route("/health", self.health), Route("/v1/models", self.models)]
        with serve_in_thread(Starlette(routes=routes), host="127.0.0.1", port=0) as url:
            yield url
