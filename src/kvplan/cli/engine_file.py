"""Targets: what a person names on the command line becomes an engine layout. No plan, no output.

A target is the path of a description (``docs/descriptions.md``), or ``tcp://host:port`` of a live engine's front desk.
One :class:`AddressSpace` serves both targets of a command, so that the made-up addresses of a dry run are disjoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.cli.live import ask_engine, is_live
from kvplan.errors import DescriptionError, LayoutError
from kvplan.layouts import AddressSpace, EngineSpec, engine_layout
from kvplan.layouts.description import read_description
from kvplan.layouts.document import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.planner import EngineLayout


@dataclass(frozen=True, slots=True)
class Target:
    """One engine that a command speaks about."""

    name: str
    """What the person wrote."""
    layout: EngineLayout
    spec: EngineSpec | None
    """The description, or None for a live engine, which gives its layout and ``facts``."""
    facts: Mapping[str, str] = field(default_factory=dict, hash=False)
    """A live engine's named fields; those that do not start with ``info.`` must be equal on both sides."""

    def window(self, group: int) -> int | None:
        """Return the sliding window of a group: the tokens a query sees; None means all."""
        if self.spec is None:
            return None
        windows = {getattr(layer, "window", None) for layer in self.spec.layers if layer.group == group}
        return windows.pop() if len(windows) == 1 else None


def load_target(target: str, addresses: AddressSpace, *, key: str = "") -> Target:
    """Return the engine that a target names. ``key`` is the side channel's, for live ones."""
    if is_live(target):
        engine = ask_engine(target, key=key)
        return Target(target, engine.layout, None, engine.facts)
    spec = read_description(target)
    try:
        return Target(target, engine_layout(spec, addresses), spec)
    except DescriptionError as error:
        raise load(Path(target)).located(error) from None
    except LayoutError as error:
        raise DescriptionError(f"{target}: {error}", file=target) from None


def load_pair(source: str, destination: str, *, key: str = "") -> tuple[Target, Target]:
    """Return both engines of a command, with disjoint addresses."""
    addresses = AddressSpace()
    return load_target(source, addresses, key=key), load_target(destination, addresses, key=key)
