"""Atoms in order: both sides list the same coordinates, and what lies there after a move is equal."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.planner import (
    Axis,
    BlockLayout,
    BlockTable,
    ComponentLayout,
    EngineLayout,
    RankLayout,
    Region,
    Span,
    atoms,
    bind,
    plan_engines,
)
from kvplan.testing.oracle import Memory, apply, value_of, write_coordinates
from kvplan.testing.strategies import engine, requests, shapes


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_both_sides_list_the_same_coordinates_and_hold_the_same_bytes(data: st.DataObject) -> None:
    left, right = data.draw(shapes(max_parallel=4, max_block=12)), data.draw(shapes(max_parallel=4, max_block=12))
    source = engine("p", left, 6, num_layers=2, num_blocks=5, base=4096)
    destination = engine("d", right, 6, num_layers=2, num_blocks=5, base=1 << 40)
    num_tokens, s, d = data.draw(requests(left.block_size, right.block_size, num_blocks=5))
    here, there = [Memory(r) for r in source.ranks], [Memory(r) for r in destination.ranks]
    for memory in here:
        write_coordinates(memory, [s])
    for pair in plan_engines(source, destination).pairs:
        runs = bind(pair, [s], [d], num_tokens=num_tokens, whole_blocks=False)
        apply(runs, here[pair.source_rank], there[pair.destination_rank])
        sides = [list(atoms(pair, side, [s], [d], num_tokens=num_tokens)) for side in ("source", "destination")]
        moved = 0
        for mine, theirs in zip(*sides, strict=True):
            assert (mine.layer, mine.component, mine.names) == (theirs.layer, theirs.component, theirs.names)
            assert (mine.tokens == theirs.tokens).all()
            assert mine.tokens.tolist() == list(range(d.first_token, num_tokens))
            moved += mine.address.size * mine.atom_bytes
            for strand in range(len(mine.address)):
                assert mine.strand(strand) == theirs.strand(strand)
                for place, memory in ((mine, here[pair.source_rank]), (theirs, there[pair.destination_rank])):
                    first = memory.view(int(place.address[strand, 0]), place.atom_bytes)
                    names = {**mine.strand(strand), "token": int(mine.tokens[0])}
                    names.setdefault("head_dim", 0)
                    wanted = value_of(mine.layer, mine.component, tuple(sorted(names.items())), 2)
                    assert bytes(first[:2]) == wanted
        assert moved == runs.total_bytes


def test_state_is_listed_by_block() -> None:

    block = BlockLayout((Axis("state_head", (Span(0, 4, 0, 32),)),), 32, "float32[8]")

    def one(base: int) -> EngineLayout:
        return EngineLayout("e", (RankLayout((Region(base, 9, 200),), (ComponentLayout("l", "ssm", 0, 0, block),)),))

    (pair,) = plan_engines(one(0), one(1 << 30)).pairs
    (table,) = atoms(pair, "source", [BlockTable(0, (8, -1, 3))], [BlockTable(0, (1, 2, 5))], num_tokens=7)
    assert table.tokens.tolist() == [0, 2]
    assert table.address.tolist() == [[1600 + 32 * h, 600 + 32 * h] for h in range(4)]
    assert np.prod(table.address.shape) == 8


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_windows_of_tokens_make_up_the_whole(data: st.DataObject) -> None:
    left, right = data.draw(shapes(max_parallel=2, max_block=12)), data.draw(shapes(max_parallel=2, max_block=12))
    source = engine("p", left, 4, num_layers=1, num_blocks=5, base=4096)
    destination = engine("d", right, 4, num_layers=1, num_blocks=5, base=1 << 40)
    num_tokens, s, d = data.draw(requests(left.block_size, right.block_size, num_blocks=5))
    width = data.draw(st.integers(1, num_tokens))
    for pair in plan_engines(source, destination).pairs:
        whole = list(atoms(pair, "source", [s], [d], num_tokens=num_tokens))
        windows = [
            list(atoms(pair, "source", [s], [d], first_token=at, num_tokens=min(at + width, num_tokens)))
            for at in range(0, num_tokens, width)
        ]
        for table, *parts in zip(whole, *windows, strict=True):
            assert np.concatenate([part.address for part in parts], axis=1).tolist() == table.address.tolist()
            assert np.concatenate([part.tokens for part in parts]).tolist() == table.tokens.tolist()


def test_state_belongs_to_the_first_window() -> None:
    block = BlockLayout((Axis("state_head", (Span(0, 4, 0, 32),)),), 32, "float32[8]")
    rank = RankLayout((Region(0, 9, 200),), (ComponentLayout("l", "ssm", 0, 0, block),))
    (pair,) = plan_engines(EngineLayout("p", (rank,)), EngineLayout("d", (rank,))).pairs
    tables = [BlockTable(0, (8,))]
    assert len(list(atoms(pair, "source", tables, tables, num_tokens=4))) == 1
    assert not list(atoms(pair, "source", tables, tables, first_token=4, num_tokens=7))
