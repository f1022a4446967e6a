"""FrontDesk: one thread in the scheduler process that answers ``hello``. No leases, no claims, no transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvplan.session.config import SessionConfig
    from kvplan.session.nouns import RankHello


class FrontDesk:
    """Answers whoever asks with this engine's hello; before its ranks are published, with "not ready"."""

    def __init__(self, *, host: str, port: int, config: SessionConfig) -> None:
        """Bind ``host:port``; port 0 takes a free one."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        """The port that is bound."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        raise NotImplementedError

    def publish(self, engine_id: str, compatibility: Mapping[str, str], ranks: Sequence[RankHello]) -> None:
        """Set the hello; may be called before or after ``start``, and again. Raises ``LayoutError``."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread. Idempotent."""
        raise NotImplementedError
