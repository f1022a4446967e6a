"""Declarations refuse what contradicts itself, and say what and where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.errors import AliasError, BoundsError, LayoutError
from kvplan.planner import Axis, BlockLayout, ComponentLayout, EngineLayout, RankLayout, Region, Span

HEADS = Axis("kv_head", (Span(4, 8, 0, 256),))
TOKENS = Axis("token", (Span(0, 16, 0, 1024), Span(16, 32, 32768, 1024)))
BLOCK = BlockLayout((TOKENS, HEADS), 256, "bfloat16[128]", tokens_per_block=32)


def rank(*blocks: BlockLayout, stride: int = 65536, groups: tuple[int, ...] = ()) -> RankLayout:
    groups = groups or (0,) * len(blocks)
    items = tuple(ComponentLayout("l", f"c{i}", g, 0, b) for i, (b, g) in enumerate(zip(blocks, groups, strict=True)))
    return RankLayout((Region(4096, 10, stride),), items)


def shifted(base: int, **changes: object) -> BlockLayout:
    return replace(BLOCK, base_bytes=base, **changes)


def test_equal_declarations_compare_equal_whatever_the_order() -> None:
    other = BlockLayout((HEADS, Axis("token", (*TOKENS.spans[::-1],))), 256, "bfloat16[128]", tokens_per_block=32)
    assert other == BLOCK
    assert hash(other) == hash(BLOCK)


def test_k_and_v_packed_in_one_block_are_disjoint() -> None:
    assert rank(BLOCK, shifted(16384)).components[1].block.base_bytes == 16384


def test_overlap_names_both_components_and_the_byte() -> None:
    with pytest.raises(AliasError, match=r"component 'c0' and layer 'l' component 'c1' both lie at byte 16383"):
        rank(BLOCK, shifted(16383))


def test_overlap_inside_one_component_is_found() -> None:
    heads = Axis("kv_head", (Span(0, 4, 0, 128),))
    with pytest.raises(AliasError, match="'c0' and layer 'l' component 'c0'"):
        rank(shifted(0, axes=(TOKENS, heads)))


def test_components_of_different_groups_may_share_bytes() -> None:
    assert len(rank(BLOCK, BLOCK, groups=(0, 1)).components) == 2


@pytest.mark.parametrize("base,stride", [(0, 49151), (-1, 65536), (16385, 65536)])
def test_bytes_outside_the_block_are_refused(base: int, stride: int) -> None:
    with pytest.raises(BoundsError, match="but the block stride is"):
        rank(shifted(base), stride=stride)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Span(3, 3), "is empty"),
        (lambda: Span(0, 1, slot=-1), "slots count from 0"),
        (lambda: Axis("x", ()), "has no spans"),
        (lambda: Axis("", (Span(0, 1),)), "needs a name"),
        (lambda: Axis("x", (Span(0, 3), Span(2, 5))), r"\[0, 3\) and \[2, 5\) overlap"),
        (lambda: shifted(0, atom_bytes=0), "at least one byte"),
        (lambda: shifted(0, format="b f"), "is not a dtype"),
        (lambda: shifted(0, format="bfloat16[100]"), "does not divide an atom of 256"),
        (lambda: shifted(0, tokens_per_block=None), "needs tokens_per_block"),
        (lambda: shifted(0, tokens_per_block=31), r"leaves \[0, 31\)"),
        (lambda: shifted(0, axes=(HEADS,)), "there is no token axis"),
        (lambda: shifted(0, axes=(HEADS, HEADS, TOKENS)), "repeat"),
        (lambda: EngineLayout("e", ()), "has no ranks"),
        (lambda: EngineLayout("e", (rank(BLOCK), rank(BLOCK))), "two ranks at"),
        (lambda: rank(BLOCK, shifted(16384, tokens_per_block=64)), "tokens_per_block 64, others have 32"),
        (lambda: RankLayout((), (ComponentLayout("l", "k", 0, 0, BLOCK),)), r"region 0 is not in \[0, 0\)"),
        (lambda: RankLayout((Region(0, 1, 65536),), (ComponentLayout("l", "k", -1, 0, BLOCK),)), "group is -1"),
        (lambda: RankLayout((Region(0, 1, 65536),), (ComponentLayout("l", "k", 0, 0, BLOCK),) * 2), "declared twice"),
        (lambda: Region(0, 0, 1), "num_blocks is 0"),
        (lambda: Region(1 << 62, 1 << 40, 1 << 40), "leaves the address space"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(make: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_t12_length_above_stride_is_refused_and_offsets_count() -> None:
    live = BlockLayout((Axis("token", (Span(0, 9, 0, 100),)),), 100, "uint8[100]", 50, 9)
    assert RankLayout((Region(0, 4, 1000),), (ComponentLayout("l", "k", 0, 0, live),)).regions[0].num_bytes == 4000
    with pytest.raises(BoundsError):
        RankLayout((Region(0, 4, 900),), (ComponentLayout("l", "k", 0, 0, live),))
