"""Kernel blocks: from the block ids that a scheduler counts to those that an attention kernel pages by. No layouts.

A logical block of one side is ``ratio`` kernel blocks of that side. Local and remote ratios are two numbers: ids of
the remote are expanded with the remote's. The planner needs no kernel block ids (a kernel block is a span of the token
axis); this is for people who compare block lists with those of vLLM's NIXL connector, where the function is
``_logical_to_kernel_block_ids`` (vLLM 0.32, ``nixl/base_worker.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.errors import BindError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def logical_to_kernel_block_ids(
    block_ids: Sequence[Sequence[int]],
    ratio: int,
    *,
    kernel_blocks: int | None = None,
    state_groups: Collection[int] = (),
    num_blocks: int | None = None,
) -> list[list[int]]:
    """Return kernel block ids per group: logical block ``b`` is kernel blocks ``b * ratio`` and those after it.

    ``ratio`` is kernel blocks per logical block *of the side that the ids belong to*. ``kernel_blocks`` takes only the
    first so many of each (a rank that reads less than a whole remote block); None takes all. Groups whose index is in
    ``state_groups`` hold state, which no kernel pages, and pass through. Raises BindError when an id is negative or,
    if ``num_blocks`` (logical) is given, not below it.

    >>> logical_to_kernel_block_ids(([0, 1, 2], [3, 4]), 2)
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    >>> logical_to_kernel_block_ids(([0, 1, 2], [10, 11]), 261, kernel_blocks=2, state_groups={1})
    [[0, 1, 261, 262, 522, 523], [10, 11]]
    """
    taken = ratio if kernel_blocks is None else kernel_blocks
    if ratio < 1 or not 0 < taken <= ratio:
        raise BindError(f"ratio is {ratio} and kernel_blocks {taken}; need 1 <= kernel_blocks <= ratio")
    for group in block_ids:
        bad = next((b for b in group if b < 0 or (num_blocks is not None and b >= num_blocks)), None)
        if bad is not None:
            raise BindError(f"logical block id {bad} is not in [0, {'...' if num_blocks is None else num_blocks})")
    return [
        list(group) if index in state_groups else [b * ratio + i for b in group for i in range(taken)]
        for index, group in enumerate(block_ids)
    ]
