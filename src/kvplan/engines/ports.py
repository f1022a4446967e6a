"""Free TCP ports on loopback for engines that are about to start. Nothing is listened on here."""

from __future__ import annotations

import random
import socket

from kvplan.errors import EngineError

__all__ = ["LOOPBACK", "PortPool"]

LOOPBACK = "127.0.0.1"


class PortPool:
    """Hands out ports that nothing listens on, each only once.

    The ports lie below the range from which Linux gives outgoing connections theirs (32768 and up), so a port that is
    free now stays free until its engine listens.
    """

    def __init__(self, *, first: int = 20_000, last: int = 31_999) -> None:
        self._candidates = list(range(first, last + 1))
        random.shuffle(self._candidates)

    def take(self) -> int:
        """A port that was free a moment ago and has not been handed out before."""
        while self._candidates:
            port = self._candidates.pop()
            if _is_free(port):
                return port
        raise EngineError("no free TCP port is left on 127.0.0.1 between 20000 and 31999")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
