"""A brute-force oracle of the JSON form: reads numbers, moves numbers, imports nothing of the library.

1. Source memory: every atom byte of every named block holds a number that says which coordinate it is.
2. The copies are applied to empty destination memory.
3. Every destination byte that the request needs must hold its own coordinate's number; no other byte is written.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

import numpy as np

BITS = {"token": 12, "kv_head": 6, "channel": 12, "width": 5, "state_head": 6, "byte": 14}
NOTHING = -1


class Atoms(NamedTuple):
    address: np.ndarray
    value: np.ndarray
    token: np.ndarray
    """Global token of each byte; -1 for state."""


def check(plan: dict[str, Any], request: dict[str, Any]) -> int:
    """Return the number of bytes moved; raises AssertionError when a byte is wrong."""
    size = 1 + max(
        region["base"] + region["num_blocks"] * region["block_stride_bytes"]
        for side in ("source", "destination")
        for rank in plan[side]["ranks"]
        for region in rank["regions"]
    )
    check_disjoint(plan)
    keys = {}
    memory = np.full(size, NOTHING, np.int64)
    held: dict[tuple[Any, ...], set[int]] = {}
    for rank in plan["source"]["ranks"]:
        for item in rank["components"]:
            key = keys.setdefault((item["layer"], item["component"]), len(keys))
            for atoms in atoms_of(rank, item, key, request, "source"):
                assert (memory[atoms.address] == NOTHING).all(), "source atoms overlap"
                memory[atoms.address] = atoms.value
                held.setdefault((item["layer"], item["component"]), set()).update(np.unique(atoms.token).tolist())
    wanted = np.full(size, NOTHING, np.int64)
    for rank in plan["destination"]["ranks"]:
        for item in rank["components"]:
            key = keys.get((item["layer"], item["component"]))
            if key is None:
                continue
            tokens = held.get((item["layer"], item["component"]), set())
            for atoms in atoms_of(rank, item, key, request, "destination"):
                moved = (atoms.token < request["num_tokens"]) & np.isin(atoms.token, list(tokens))
                assert (wanted[atoms.address] == NOTHING).all(), "destination atoms overlap"
                wanted[atoms.address[moved]] = atoms.value[moved]
    got = apply(plan, memory)
    assert (got == wanted).all(), explain(plan, got, wanted)
    return int((wanted != NOTHING).sum())


def check_disjoint(plan: dict[str, Any]) -> None:
    spans = sorted(
        (region["base"], region["base"] + region["num_blocks"] * region["block_stride_bytes"])
        for side in ("source", "destination")
        for rank in plan[side]["ranks"]
        for region in rank["regions"]
    )
    for (_, stop), (start, _) in itertools.pairwise(spans):
        assert stop <= start, "regions overlap"


def atoms_of(rank: dict[str, Any], item: dict[str, Any], key: int, request: dict[str, Any], side: str):
    """Yield the bytes of one component in each of the request's blocks."""
    region = rank["regions"][item["region"]]
    group = request["groups"][item["group"]][side]
    for i, block in enumerate(group["block_ids"]):
        if block < 0:
            continue
        assert block < region["num_blocks"]
        base = region["base"] + block * region["block_stride_bytes"] + item["base_bytes"]
        per_block = item["tokens_per_block"]
        first = 0 if per_block is None else group["first_token"] + i * per_block
        state_block = i if per_block is None else 0
        yield _atoms(item, key, base, first, state_block, region["block_stride_bytes"])


def _atoms(item: dict[str, Any], key: int, base: int, first: int, state_block: int, stride: int) -> Atoms:
    address = np.full(1, base, np.int64)
    value = np.full(1, key * 16 + state_block, np.int64)
    token = np.full(1, -1 if item["tokens_per_block"] is None else 0, np.int64)
    byte = np.arange(item["atom_bytes"], dtype=np.int64)
    axes = {axis["name"]: axis["spans"] for axis in item["axes"]}
    for name, bits in BITS.items():
        if name == "byte":
            column = axes.pop("head_dim", None)
            place, offset = byte, byte
            if column is not None:
                where, x = _axis(column)
                place = (where[:, None] + byte).reshape(-1)
                offset = (x[:, None] * item["atom_bytes"] + byte).reshape(-1)
        elif name in axes:
            place, offset = _axis(axes.pop(name))
            if name == "token":
                offset = offset + first
            if name == "width":
                offset = offset + 16
        else:
            place = offset = np.zeros(1, np.int64)
        assert (offset >= 0).all()
        assert (offset < 1 << bits).all()
        address = (address[:, None] + place).reshape(-1)
        value = ((value[:, None] << bits) + offset).reshape(-1)
        step = offset if name == "token" and item["tokens_per_block"] is not None else np.zeros_like(offset)
        token = (token[:, None] + step).reshape(-1)
    assert not axes, f"axes nobody knows: {list(axes)}"
    inside = address - (base - item["base_bytes"])
    assert (inside >= 0).all(), "an atom leaves its block"
    assert (inside < stride).all(), "an atom leaves its block"
    assert len(np.unique(address)) == len(address), "two atoms of one component lie at one byte"
    count = int(re.fullmatch(r"\w+(?:\[(\d+)\])?", item["format"])[1] or 1)
    assert item["atom_bytes"] % count == 0
    return Atoms(address, value, token)


def _axis(spans: list[dict[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    x = [np.arange(s["start"], s["stop"]) for s in spans]
    place = [s["offset_bytes"] + (c - s["start"]) * s["stride_bytes"] for s, c in zip(spans, x, strict=True)]
    return np.concatenate(place), np.concatenate(x)


def apply(plan: dict[str, Any], memory: np.ndarray) -> np.ndarray:
    """Return destination memory after all copies; each must lie in its ranks' regions and write once."""
    got = np.full(len(memory), NOTHING, np.int64)
    bounds = {side: [_bounds(rank) for rank in plan[side]["ranks"]] for side in ("source", "destination")}
    for copy in plan["copies"]:
        count = copy["num_bytes"]
        assert count > 0
        read, write = copy["source_address"], copy["destination_address"]
        assert _inside(bounds["source"][copy["source_rank"]], read, count)
        assert _inside(bounds["destination"][copy["destination_rank"]], write, count)
        taken = memory[read : read + count]
        assert (taken != NOTHING).all(), "a copy reads bytes that hold nothing"
        assert (got[write : write + count] == NOTHING).all(), "a destination byte is written twice"
        got[write : write + count] = taken
        assert copy["destination_rank"] in plan["readers"][str(copy["source_rank"])]
    return got


def _bounds(rank: dict[str, Any]) -> list[tuple[int, int]]:
    return [(r["base"], r["base"] + r["num_blocks"] * r["block_stride_bytes"]) for r in rank["regions"]]


def _inside(bounds: list[tuple[int, int]], start: int, count: int) -> bool:
    return any(low <= start and start + count <= high for low, high in bounds)


def explain(plan: dict[str, Any], got: np.ndarray, wanted: np.ndarray) -> str:
    bad = int(np.flatnonzero(got != wanted)[0])
    for number, rank in enumerate(plan["destination"]["ranks"]):
        for place, (low, high) in enumerate(_bounds(rank)):
            if low <= bad < high:
                block, offset = divmod(bad - low, rank["regions"][place]["block_stride_bytes"])
                return f"rank {number} region {place} block {block} byte {offset}: {got[bad]} instead of {wanted[bad]}"
    return f"byte {bad} outside every region"
