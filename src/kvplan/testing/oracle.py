"""The memory oracle: what every byte of the destination must be, worked out without the planner.

1. ``Memory`` holds the bytes of every region of one rank, at made-up addresses.
2. ``write_coordinates`` walks a rank's declarations coordinate by coordinate and writes to each element a value
   that depends on nothing but (layer, component, coordinates): what a right cache would hold.
3. ``apply`` copies descriptors from one memory to another, byte for byte.
4. ``check_moved`` says which destination elements should hold their value, and that nothing else was written.

Nothing here uses spans' arithmetic from the planner's tables: addresses are summed up one by one.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvplan.planner import BlockTable, ComponentLayout, Descriptors, RankLayout

UNTOUCHED = 0xEE
"""Byte that fills memory before anything is written."""

ELEMENT_AXIS = "head_dim"
"""Axis into which an atom of many elements counts: ``bfloat16[128]`` is 128 coordinates of it."""


@dataclass
class Memory:
    """Bytes of one rank's regions."""

    rank: RankLayout
    bytes: list[NDArray[np.uint8]] = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = [np.full(region.num_bytes, UNTOUCHED, np.uint8) for region in self.rank.regions]

    def view(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return the bytes at an absolute address; raises IndexError when they are not inside one region."""
        for region, held in zip(self.rank.regions, self.bytes, strict=True):
            if region.base <= address and address + num_bytes <= region.base + region.num_bytes:
                return held[address - region.base : address - region.base + num_bytes]
        raise IndexError(f"[{address}, {address + num_bytes}) is not inside one region")


class Element(NamedTuple):
    """One element of the cache: where it lies and what it must hold."""

    region: int
    offset: int
    value: bytes
    token: int | None


@lru_cache(maxsize=1 << 17)
def value_of(layer: str, component: str, coordinates: tuple[tuple[str, int], ...], num_bytes: int) -> bytes:
    """Return the bytes that a coordinate's element must hold; never all ``UNTOUCHED``."""
    text = f"{layer}/{component}/{coordinates}".encode()
    seed = zlib.crc32(text) | zlib.adler32(text) << 32
    value = (seed * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little")
    value = (value * (num_bytes // 8 + 1))[:num_bytes]
    return bytes(b ^ 1 if b == UNTOUCHED else b for b in value)


def elements(rank: RankLayout, tables: Sequence[BlockTable]) -> Iterator[Element]:
    """Yield every element that the rank holds of one request, its block ids given per group."""
    for item in rank.components:
        yield from _component_elements(item, rank, tables[item.group])


def _component_elements(item: ComponentLayout, rank: RankLayout, table: BlockTable) -> Iterator[Element]:
    block, stride = item.block, rank.regions[item.region].block_stride_bytes
    count = int(block.format.partition("[")[2].rstrip("]") or 1)
    size = block.atom_bytes // count
    places = [[(axis.name, x, s.offset_bytes + (x - s.start) * s.stride_bytes)
               for s in axis.spans for x in range(s.start, s.stop)] for axis in block.axes]  # fmt: skip
    if count > 1:
        places.append([(ELEMENT_AXIS, j, j * size) for j in range(count)])
    for index, block_id in enumerate(table.block_ids):
        if block_id < 0:
            continue
        first = table.first_token + index * (block.tokens_per_block or 0)
        for combination in itertools.product(*places):
            names = {name: x for name, x, _ in combination}
            if block.tokens_per_block is None:
                names["state"] = index
            else:
                names["token"] += first
            offset = block_id * stride + block.base_bytes + sum(o for _, _, o in combination)
            key = tuple(sorted(names.items()))
            yield Element(item.region, offset, value_of(item.layer, item.component, key, size), names.get("token"))


def write_coordinates(memory: Memory, tables: Sequence[BlockTable]) -> None:
    """Write to every element that the rank holds of a request the value of its coordinates."""
    for element in elements(memory.rank, tables):
        held = memory.bytes[element.region]
        held[element.offset : element.offset + len(element.value)] = np.frombuffer(element.value, np.uint8)


def apply(descriptors: Descriptors, source: Memory, destination: Memory) -> None:
    """Copy every descriptor; raises IndexError when one leaves the regions of its side."""
    columns = (descriptors.source_address, descriptors.destination_address, descriptors.num_bytes)
    for s, d, n in zip(*(column.tolist() for column in columns), strict=True):
        destination.view(d, n)[:] = source.view(s, n)


def check_moved(memory: Memory, tables: Sequence[BlockTable], moved: Callable[[int | None], bool]) -> None:
    """Raise AssertionError unless exactly the elements whose token is ``moved`` hold their values.

    ``moved`` takes the token, None for state. Every other byte of the memory must be untouched.
    """
    expected = [np.full_like(held, UNTOUCHED) for held in memory.bytes]
    for element in elements(memory.rank, tables):
        if moved(element.token):
            value = np.frombuffer(element.value, np.uint8)
            expected[element.region][element.offset : element.offset + len(value)] = value
    for region, (want, have) in enumerate(zip(expected, memory.bytes, strict=True)):
        wrong = np.flatnonzero(want != have)
        if len(wrong):
            at = int(wrong[0])
            kind = "written but should not be" if want[at] == UNTOUCHED else "wrong"
            raise AssertionError(f"region {region} byte {at} is {kind}: {have[at]:#x}, expected {want[at]:#x}; "
                                 f"{len(wrong)} bytes differ")  # fmt: skip


def tokens_of(table: BlockTable, tokens_per_block: int) -> Iterable[int]:
    """Yield every token position for which a table names a block."""
    for index, block_id in enumerate(table.block_ids):
        if block_id >= 0:
            first = table.first_token + index * tokens_per_block
            yield from range(first, first + tokens_per_block)
