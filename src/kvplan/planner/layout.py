"""Layouts: what one rank, and one engine, declares. No pairs of sides, no plans.

The address of an atom is separable by axis::

    region.base + block_id * region.block_stride_bytes + base_bytes + sum over axes of span(coordinate)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvplan.errors import BoundsError, LayoutError
from kvplan.planner.footprint import check_disjoint
from kvplan.planner.span import Axis

TOKEN = "token"  # noqa: S105 - an axis, not a secret
"""Name of the axis that is cut into blocks."""

ADDRESS_LIMIT = 1 << 63
"""One past the highest address that a region may reach."""

_FORMAT = re.compile(r"(?P<dtype>[A-Za-z_][A-Za-z0-9_.]*)(?:\[(?P<count>[1-9][0-9]*)\])?")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One component inside one block: its axes, atom and base offset."""

    axes: tuple[Axis, ...]
    """Named axes in any order; they are sorted by name at construction, the address does not depend on it."""
    atom_bytes: int
    """Bytes of the piece that no deployment ever splits."""
    format: str
    """Format tag of the atom, as ``bfloat16[128]`` or ``float32``; compared, never converted."""
    base_bytes: int = 0
    """Offset inside the block that is added to every coordinate's."""
    tokens_per_block: int | None = None
    """Tokens of the sequence that one block id stands for; None for state, which has no token axis."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(sorted(self.axes, key=lambda axis: axis.name)))
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError(f"axis names {names} repeat; each axis is declared once")
        if self.atom_bytes <= 0:
            raise LayoutError(f"atom_bytes is {self.atom_bytes}; an atom has at least one byte")
        element_bytes(self.format, self.atom_bytes)
        self._check_tokens()

    def _check_tokens(self) -> None:
        token = self.axis(TOKEN)
        if self.tokens_per_block is None:
            if token is not None:
                raise LayoutError("a token axis needs tokens_per_block")
            return
        if token is None:
            raise LayoutError(f"tokens_per_block is {self.tokens_per_block}, but there is no token axis")
        if self.tokens_per_block <= 0:
            raise LayoutError(f"tokens_per_block is {self.tokens_per_block}; it must be positive")
        first, last = token.spans[0].start, token.spans[-1].stop
        if first < 0 or last > self.tokens_per_block:
            raise LayoutError(f"token axis [{first}, {last}) leaves [0, {self.tokens_per_block})")
        if any(span.slot for span in token.spans):
            raise LayoutError("a declaration speaks of one block: token spans have slot 0")

    def axis(self, name: str) -> Axis | None:
        """Return the axis of that name, or None."""
        return next((axis for axis in self.axes if axis.name == name), None)


@dataclass(frozen=True, slots=True)
class Region:
    """One registered memory range: ``num_blocks`` blocks, ``block_stride_bytes`` apart."""

    base: int
    """Address of block 0, bytes."""
    num_blocks: int
    block_stride_bytes: int
    device: str = "cpu"
    """Device tag, as ``cpu`` or ``cuda:0``."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_stride_bytes"):
            if getattr(self, name) <= 0:
                raise BoundsError(f"region {name} is {getattr(self, name)}; it must be positive")
        if self.base < 0 or self.base + self.num_bytes > ADDRESS_LIMIT:
            raise BoundsError(f"region [{self.base}, {self.base + self.num_bytes}) leaves the address space")

    @property
    def num_bytes(self) -> int:
        """Bytes from the first block's first byte to the last block's last."""
        return self.num_blocks * self.block_stride_bytes


@dataclass(frozen=True, slots=True)
class ComponentLayout:
    """One logical tensor of one layer on one rank."""

    layer: str
    """Layer name: the key by which the two sides are joined."""
    component: str
    """Component name, as ``k``, ``v``, ``latent``, ``conv.x``, ``ssm``."""
    group: int
    """Index of the KV cache group, which chooses the block table."""
    region: int
    """Index into the rank's regions."""
    block: BlockLayout
    optional: bool = False
    """True when the other side may lack it; then it is reported as not moved, not refused."""

    @property
    def key(self) -> tuple[str, str]:
        """Join key: (layer, component)."""
        return (self.layer, self.component)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Every (layer, component) of one rank. One that exists is valid: nothing aliases, nothing leaves its block."""

    regions: tuple[Region, ...]
    components: tuple[ComponentLayout, ...]
    tp: int = 0
    pp: int = 0
    dcp: int = 0

    def __post_init__(self) -> None:
        seen: set[tuple[str, str]] = set()
        for item in self.components:
            if item.key in seen:
                raise LayoutError(f"layer {item.layer!r} component {item.component!r} is declared twice")
            seen.add(item.key)
            if item.group < 0:
                raise LayoutError(f"layer {item.layer!r}: group is {item.group}; groups count from 0")
            if not 0 <= item.region < len(self.regions):
                raise BoundsError(f"layer {item.layer!r}: region {item.region} is not in [0, {len(self.regions)})")
        check_disjoint(self)
        check_groups(self.components)

    def component(self, layer: str, component: str) -> ComponentLayout | None:
        """Return the declaration of one component, or None."""
        return next((item for item in self.components if item.key == (layer, component)), None)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """All ranks of one engine: what crosses the handshake."""

    engine_id: str
    ranks: tuple[RankLayout, ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise LayoutError(f"engine {self.engine_id!r} has no ranks")
        seen: set[tuple[int, int, int]] = set()
        for rank in self.ranks:
            place = (rank.tp, rank.pp, rank.dcp)
            if place in seen:
                raise LayoutError(f"engine {self.engine_id!r} has two ranks at (tp, pp, dcp) = {place}")
            seen.add(place)
        check_groups(tuple(item for rank in self.ranks for item in rank.components))


def element_bytes(format_: str, atom_bytes: int) -> tuple[str, int, int]:
    """Return (dtype, number of elements, bytes per element) of an atom.

    >>> element_bytes("bfloat16[128]", 256)
    ('bfloat16', 128, 2)
    """
    match = _FORMAT.fullmatch(format_)
    if match is None:
        raise LayoutError(f"format {format_!r} is not a dtype with an optional count, as 'bfloat16[128]'")
    count = int(match["count"] or 1)
    if atom_bytes % count:
        raise LayoutError(f"format {format_!r} does not divide an atom of {atom_bytes} bytes")
    return match["dtype"], count, atom_bytes // count


def check_groups(components: tuple[ComponentLayout, ...]) -> None:
    """Refuse groups whose components disagree about the tokens of one block: they share one block table."""
    tokens: dict[int, int | None] = {}
    for item in components:
        held = tokens.setdefault(item.group, item.block.tokens_per_block)
        if held != item.block.tokens_per_block:
            raise LayoutError(
                f"group {item.group}: layer {item.layer!r} has tokens_per_block {item.block.tokens_per_block}, "
                f"others have {held}; layers that share a block table have one value"
            )
