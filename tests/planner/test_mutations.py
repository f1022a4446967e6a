"""Breaking the planner is caught: by the proof when the plan is built, and by the oracle when bytes have moved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvplan.errors import PlanError
from kvplan.planner import BlockTable, EngineLayout, PairPlan, bind, plan_engines
from kvplan.planner.meeting import Meeting, meet
from kvplan.planner.proof import prove
from kvplan.planner.rows import Rows, concatenate, rows_of
from kvplan.testing.oracle import Memory, apply, check_moved, write_coordinates
from kvplan.testing.strategies import Shape, component, engine

SOURCE, DESTINATION = Shape(4, 6, 3, "NHD", "packed"), Shape(3, 4, 4, "HND", "split")


def meeting() -> tuple[Meeting, dict[tuple[int, ...], int], dict[int, Rows]]:
    """A meeting of one destination rank with four sources, its election and rows; all of it right."""
    here = {rank: component(SOURCE, 12, rank, "k")[0] for rank in range(4)}
    found = meet(component(DESTINATION, 12, 1, "k")[0], here)
    elected = {labels: mask.bit_length() - 1 for labels, mask in found.classes}
    rows = {
        rank: concatenate([rows_of(c) for c in found.cells(rank, [k for k, r in elected.items() if r == rank])])
        for rank in set(elected.values())
    }
    return found, elected, rows


def test_the_right_rows_are_proved() -> None:
    found, elected, rows = meeting()
    assert len(rows) == 2
    prove(found, elected, rows)


@pytest.mark.parametrize("column", Rows._fields)
def test_one_wrong_number_in_one_row_fails_the_proof(column: str) -> None:
    for index in (0, 3, -1):
        found, elected, rows = meeting()
        rank = max(rows)
        values = getattr(rows[rank], column).copy()
        values[index] += 8
        rows[rank] = rows[rank]._replace(**{column: values})
        with pytest.raises(PlanError):
            prove(found, elected, rows)


def test_a_missing_row_fails_the_proof_and_names_the_coordinate() -> None:
    found, elected, rows = meeting()
    rank = min(rows)
    rows[rank] = Rows(*(values[:-1] for values in rows[rank]))
    with pytest.raises(PlanError, match=r"kv_head \d+, token \d+ is not written"):
        prove(found, elected, rows)


def test_rows_of_the_wrong_source_rank_fail_the_proof() -> None:
    found, elected, rows = meeting()
    low, high = sorted(rows)
    with pytest.raises(PlanError, match=r"from the wrong place|is not written|for .* atoms"):
        prove(found, elected, {low: rows[high], high: rows[low]})


def test_a_row_too_many_fails_the_proof() -> None:
    found, elected, rows = meeting()
    rank = min(rows)
    extra = Rows(*(values[:1] for values in rows[rank]))
    extra = extra._replace(destination_offset=extra.destination_offset + (1 << 20))
    rows[rank] = concatenate([rows[rank], extra])
    with pytest.raises(PlanError, match="bytes for"):
        prove(found, elected, rows)


def moved(source: EngineLayout, destination: EngineLayout, pairs: list[PairPlan]) -> None:
    """Move one request and check every byte."""
    s, d = BlockTable(0, (4, 0, 3)), BlockTable(4, (6, 1, 2))
    here, there = [Memory(r) for r in source.ranks], [Memory(r) for r in destination.ranks]
    for memory in here:
        write_coordinates(memory, [s])
    for pair in pairs:
        runs = bind(pair, [s], [d], num_tokens=15, whole_blocks=False)
        apply(runs, here[pair.source_rank], there[pair.destination_rank])
    for memory in there:
        check_moved(memory, [d], lambda token: token is not None and 4 <= token < 15)


def engines() -> tuple[EngineLayout, EngineLayout]:
    return (
        engine("p", SOURCE, 12, num_layers=2, num_blocks=5, base=4096),
        engine("d", DESTINATION, 12, num_layers=2, num_blocks=7, base=1 << 40),
    )


def test_the_unbroken_plan_passes_the_oracle() -> None:
    source, destination = engines()
    moved(source, destination, list(plan_engines(source, destination).pairs))


def shifted_offset(pair: PairPlan) -> PairPlan:
    part = pair.parts[0]
    offset = part.rows.source_offset.copy()
    offset[np.flatnonzero(part.rows.destination_slot == 1)[0]] += 2
    rows = part.rows._replace(source_offset=offset)
    return replace(pair, parts=(replace(part, rows=rows), *pair.parts[1:]))


def swapped_heads(pair: PairPlan) -> PairPlan:
    part = pair.parts[0]
    rows = part.rows
    place = rows.source_offset.copy()
    a, b = np.flatnonzero(rows.destination_slot == 1)[:2]
    place[[a, b]] = place[[b, a]]
    return replace(pair, parts=(replace(part, rows=rows._replace(source_offset=place)), *pair.parts[1:]))


def other_source(pair: PairPlan) -> PairPlan:
    return replace(pair, source_rank=(pair.source_rank + 1) % 4)


def lost_part(pair: PairPlan) -> PairPlan:
    return replace(pair, parts=pair.parts[1:])


@pytest.mark.parametrize("broken", [shifted_offset, swapped_heads, other_source, lost_part])
def test_the_oracle_catches_a_broken_plan(broken: object) -> None:
    source, destination = engines()
    pairs = list(plan_engines(source, destination).pairs)
    pairs[0] = broken(pairs[0])
    with pytest.raises((AssertionError, IndexError)):
        moved(source, destination, pairs)
