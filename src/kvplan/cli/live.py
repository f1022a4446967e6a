"""Live engines: ``tcp://host:port`` of a front desk becomes an address, an answer or a layout. No plan, no output.

Every question goes through the side channel and its key, and every failure is a sentence (``kvplan.wire.asking``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from kvplan.errors import DescriptionError, UnavailableError, WireError
from kvplan.session.config import KEY_VARIABLE
from kvplan.wire.addresses import parse_address
from kvplan.wire.asking import Asker
from kvplan.wire.layouts import from_body
from kvplan.wire.messages import Hello, HelloRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.planner import EngineLayout
    from kvplan.wire.addresses import Address
    from kvplan.wire.messages import Message

SCHEME = "tcp://"
TIMEOUT_S = 5.0
"""How long an engine may take to answer one question."""


def key_option() -> str:
    """Return the declaration of ``--key`` for a command."""
    text = f"Shared key of the engines' side channel; better set {KEY_VARIABLE}: arguments are visible to others."
    option: str = typer.Option("", "--key", envvar=KEY_VARIABLE, show_envvar=False, help=text)
    return option


def is_live(target: str) -> bool:
    """Return whether a target names a live engine."""
    return target.startswith(SCHEME)


def live_address(target: str) -> Address:
    """Return the address in ``tcp://host:port``. Raises ``DescriptionError``."""
    try:
        return parse_address(target.removeprefix(SCHEME).rstrip("/"))
    except WireError as error:
        raise DescriptionError(f"{target}: {error}; write {SCHEME}host:port") from None


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """What an engine's front desk says about it."""

    layout: EngineLayout
    hello: Hello

    @property
    def facts(self) -> Mapping[str, str]:
        """Its named fields; those that do not start with ``info.`` must be equal on both sides."""
        return {**self.hello.compatibility, "transport": self.hello.ranks[0].transport}


def ask_engine(target: str, *, key: str = "", timeout_s: float = TIMEOUT_S) -> LiveEngine:
    """Return a live engine. Raises ``UnavailableError`` with a sentence when it cannot be asked."""
    address = live_address(target)
    with Asker(key=key) as asker:
        hello = asker.ask(address, HelloRequest(), timeout_s=timeout_s)
    if not isinstance(hello, Hello):
        raise unexpected(address, hello)
    try:
        return LiveEngine(from_body(hello.engine_id, hello.layout), hello)
    except WireError as error:
        text = f"{address}: its hello is wrong: {error}"
        raise UnavailableError(text, address=str(address), why="protocol") from None


def unexpected(address: Address, message: Message) -> UnavailableError:
    """Return the error for an answer that fits no question of ours."""
    text = f"{address}: answers with {type(message).__name__}; is it a front desk, not a rank?"
    return UnavailableError(text, address=str(address), why="protocol")
