"""Election: which of several source ranks that hold the same coordinates is read. No bytes.

1. A task is (destination rank, set of source ranks that hold what it needs). Tasks with one holder are forced.
2. The other tasks of one holder set are dealt out in order: the i-th of n needers starts at holder i * |holders| / n.
   A source that this destination reads anyway is taken first: that costs no further reader.
3. Readers are then levelled: while some source has two readers more than one that it could hand a reader to,
   along a path of such hand-overs, it hands one over.

The result is plain data, equal on both sides of a handshake, because both compute it from the same two layouts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Task = tuple[int, int]
    """(destination rank, mask of source ranks)."""


@dataclass(frozen=True, slots=True)
class Election:
    """Who reads from whom."""

    assignments: tuple[tuple[int, int, int], ...]
    """(destination rank, mask of holders, elected source rank), ascending."""
    readers: tuple[tuple[int, ...], ...]
    """Per source rank, the destination ranks that read from it, ascending."""
    sources: tuple[tuple[int, ...], ...]
    """Per destination rank, the source ranks that it reads from, ascending."""

    def chosen(self) -> dict[tuple[int, int], int]:
        """Return the elected source rank per (destination rank, mask of holders)."""
        return {(destination, mask): source for destination, mask, source in self.assignments}


def holders(mask: int) -> list[int]:
    """Return the ranks of a bit mask, ascending.

    >>> holders(0b1010)
    [1, 3]
    """
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def assign(tasks: Iterable[Task], *, num_sources: int, num_destinations: int, salt: int) -> Election:
    """Return the election over all tasks; ``salt`` turns the starting holder so that engines spread."""
    ordered = sorted(set(tasks))
    chosen = {task: holders(task[1])[0] for task in ordered if task[1].bit_count() == 1}
    edges = {(source, task[0]) for task, source in chosen.items()}
    by_mask: dict[int, list[int]] = {}
    for destination, mask in ordered:
        if (destination, mask) not in chosen:
            by_mask.setdefault(mask, []).append(destination)
    for mask, needers in by_mask.items():
        _deal(mask, needers, chosen, edges, salt)
    _level(chosen, num_sources)
    return _election(chosen, num_sources, num_destinations)


def _deal(mask: int, needers: list[int], chosen: dict[Task, int], edges: set[tuple[int, int]], salt: int) -> None:
    ranks = holders(mask)
    turn = salt % max(1, len(ranks) // len(needers))
    for i, destination in enumerate(needers):
        start = i * len(ranks) // len(needers) + turn
        order = [ranks[(start + j) % len(ranks)] for j in range(len(ranks))]
        source = next((rank for rank in order if (rank, destination) in edges), order[0])
        chosen[destination, mask] = source
        edges.add((source, destination))


def _level(chosen: dict[Task, int], num_sources: int) -> None:
    while True:
        tasks: dict[tuple[int, int], list[Task]] = {}
        for task, source in chosen.items():
            tasks.setdefault((source, task[0]), []).append(task)
        path = _path(tasks, num_sources)
        if not path:
            return
        for source, destination, target in path:
            for task in tasks[source, destination]:
                chosen[task] = target


def _path(tasks: Mapping[tuple[int, int], list[Task]], num_sources: int) -> list[tuple[int, int, int]]:
    """Return hand-overs (source, destination, new source) that lower the highest load that can be lowered, or none."""
    load = [0] * num_sources
    moves: dict[int, list[tuple[int, int]]] = {}
    for (source, destination), held in tasks.items():
        load[source] += 1
        mask = -1
        for _, holding in held:
            mask &= holding
        for target in holders(mask & ~(1 << source)):
            if (target, destination) not in tasks:
                moves.setdefault(source, []).append((destination, target))
    for start in sorted(moves, key=lambda rank: -load[rank]):
        found = _search(start, load, moves)
        if found:
            return found
    return []


def _search(start: int, load: list[int], moves: Mapping[int, list[tuple[int, int]]]) -> list[tuple[int, int, int]]:
    came: dict[int, tuple[int, int]] = {}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for destination, target in moves.get(rank, ()):
            if target == start or target in came:
                continue
            came[target] = (rank, destination)
            if load[target] <= load[start] - 2:
                return _unwound(start, target, came)
            queue.append(target)
    return []


def _unwound(start: int, end: int, came: Mapping[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    path = []
    while end != start:
        rank, destination = came[end]
        path.append((rank, destination, end))
        end = rank
    moved = [(rank, destination) for rank, destination, _ in path]
    return path if len(set(moved)) == len(moved) else []


def _election(chosen: Mapping[Task, int], num_sources: int, num_destinations: int) -> Election:
    readers: list[set[int]] = [set() for _ in range(num_sources)]
    sources: list[set[int]] = [set() for _ in range(num_destinations)]
    for (destination, _), source in chosen.items():
        readers[source].add(destination)
        sources[destination].add(source)
    return Election(
        tuple(sorted((destination, mask, source) for (destination, mask), source in chosen.items())),
        tuple(tuple(sorted(ranks)) for ranks in readers),
        tuple(tuple(sorted(ranks)) for ranks in sources),
    )
