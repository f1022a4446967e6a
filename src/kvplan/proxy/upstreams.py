"""The engines of one role behind the router: whose turn it is, and who is there. Sends no requests of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

import httpx

from kvplan.errors import DescriptionError

__all__ = ["Upstreams"]

_HEALTH_TIMEOUT_S = 2.0


class Upstreams:
    """Base URLs of engines that do the same job, taken in turn."""

    def __init__(self, role: str, urls: Sequence[str]) -> None:
        if not urls:
            raise DescriptionError(f"the router needs at least one {role} engine")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise DescriptionError(f"{role} engine {url!r} is not a URL such as http://127.0.0.1:8000")
        self.role = role
        self.urls = tuple(url.rstrip("/") for url in urls)
        self._turns = count()

    def in_turn(self) -> tuple[str, ...]:
        """All URLs, the one whose turn it is first; the others follow for the case that it cannot be reached.

        >>> engines = Upstreams("decode", ["http://a", "http://b"])
        >>> engines.in_turn(), engines.in_turn()
        (('http://a', 'http://b'), ('http://b', 'http://a'))
        """
        first = next(self._turns) % len(self.urls)
        return self.urls[first:] + self.urls[:first]

    async def health(self, client: httpx.AsyncClient) -> dict[str, bool]:
        """Whether each engine says that it is healthy."""
        answers = await asyncio.gather(*(_is_healthy(client, url) for url in self.urls))
        return dict(zip(self.urls, answers, strict=True))


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        response = await client.get(f"{url}/health", timeout=_HEALTH_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK
