"""The names of the field agree with the one mechanism and with the rules that vLLM's NIXL connector computes."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

import kvplan
from kvplan.errors import BindError, LayoutError, SessionError
from kvplan.layouts.attention import AttentionSpec
from kvplan.layouts.conv_split import MambaConvSplitInfo
from kvplan.layouts.engine import AddressSpace, EngineSpec, engine_layout
from kvplan.layouts.geometry import CacheGeometry
from kvplan.layouts.kernel_blocks import logical_to_kernel_block_ids
from kvplan.layouts.mamba2 import Mamba2Spec
from kvplan.layouts.parallel import Parallel, Place, held
from kvplan.layouts.topology import EngineTransferInfo, TransferTopology
from kvplan.layouts.tp_mapping import compute_tp_mapping
from kvplan.layouts.transfer_plan import generate_engine_transfer_plan
from kvplan.planner import BlockTable, EngineLayout, plan_engines


def topology(rank: int, tp: int, heads: int, *, mla: bool = False) -> TransferTopology:
    return TransferTopology(rank, tp, 16, "here", mla, False, heads)


def attention_engine(name: str, tp: int, heads: int, space: AddressSpace, block_size: int = 4) -> EngineLayout:
    layers = (AttentionSpec(name="l.0", num_kv_heads=heads, head_dim=2),)
    cache = CacheGeometry(block_size=block_size, num_blocks=8)
    spec = EngineSpec(engine_id=name, layers=layers, num_layers=1, parallel=Parallel(tp=tp), cache=cache)
    return engine_layout(spec, space)


@pytest.mark.parametrize("heads", range(1, 17))
def test_every_head_comes_once_for_all_tp_pairs_up_to_16(heads: int) -> None:
    for remote in range(1, 17):
        for local in range(1, 17):
            rank = random.Random(heads * 289 + remote * 17 + local).randrange(local)
            mapping = compute_tp_mapping(topology(rank, local, heads), remote, ("attention",))
            low, high = held(rank, local, heads)
            given = [set(range(*held(source, remote, heads))) for source in mapping.source_ranks_per_group[0]]
            assert set().union(*given) >= set(range(low, high))
            for source, heads_given in zip(mapping.source_ranks_per_group[0], given, strict=True):
                first = min(heads_given & set(range(low, high)))
                assert mapping.head_offsets[source] == first - held(source, remote, heads)[0]
                assert rank in mapping.readers[source]
            starts = [min(g) for g in given]
            assert starts == sorted(starts)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16])
def test_the_mapping_is_what_the_plan_of_real_layouts_does(heads: int) -> None:
    for remote, local in [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (4, 3), (8, 4), (4, 8), (16, 6), (5, 16)]:
        space = AddressSpace()
        plan = plan_engines(attention_engine("p", remote, heads, space), attention_engine("d", local, heads, space))
        for rank in range(local):
            mapping = compute_tp_mapping(topology(rank, local, heads), remote, ("attention",))
            assert mapping.all_source_ranks == plan.sources[rank]
            assert mapping.readers == plan.readers


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_dividing_sizes_agree_with_the_rules_of_vllm(heads: int) -> None:
    """vLLM 0.32, nixl/tp_mapping.py: number of sources, and the offset factor, where one TP size divides the other."""
    for remote in (1, 2, 4, 8, 16):
        for local in (1, 2, 4, 8, 16):
            for rank in range(local):
                mapping = compute_tp_mapping(topology(rank, local, heads), remote, ("attention",))
                if local >= remote:
                    sources = {rank * remote // local}
                else:
                    ratio = remote // local
                    sources = set(range(rank * ratio, (rank + 1) * ratio))
                    sources = {r * heads // remote: r for r in sorted(sources, reverse=True)}.values()
                assert len(mapping.source_ranks_per_group[0]) == len(sources)
                ours = [r * heads // remote for r in mapping.source_ranks_per_group[0]]
                assert ours == sorted(r * heads // remote for r in sources)
                if local > remote and local <= heads:
                    assert mapping.rank_offset_factor == rank % (local // remote)
                elif local > remote:
                    first = mapping.source_ranks_per_group[0][0]
                    assert mapping.rank_offset_factor == rank * heads // local - first * heads // remote
                else:
                    assert mapping.rank_offset_factor == 0


def test_t05_attention_and_state_sources() -> None:
    def sources(remote: int, local: int) -> tuple[int, ...]:
        found = compute_tp_mapping(topology(0, local, 2), remote, ("attention", "state"))
        return tuple(map(len, found.source_ranks_per_group))

    assert sources(2, 1) == (2, 2)
    assert sources(4, 1) == (2, 4)
    assert sources(4, 2) == (1, 2)
    found = compute_tp_mapping(topology(0, 1, 2), 4, ("attention", "state"))
    low, high = found.source_ranks_per_group[0]
    assert low in {0, 1}
    assert high in {2, 3}
    assert found.source_ranks_per_group[1] == (0, 1, 2, 3)
    assert found.rank_to_attention_slot == {0: 0, 1: 0, 2: 1, 3: 1}


def test_t06_replicated_latent_has_one_source_and_all_ranks_are_known() -> None:
    found = compute_tp_mapping(topology(0, 1, 1, mla=True), 8, ("mla",))
    assert len(found.all_source_ranks) == 1
    assert len(found.readers) == 8
    spread = [compute_tp_mapping(topology(r, 8, 1, mla=True), 2, ("mla",)).all_source_ranks for r in range(8)]
    assert spread == [(0,)] * 4 + [(1,)] * 4
    assert compute_tp_mapping(topology(0, 8, 1, mla=True), 2, ("mla",)).local_consumers == 4


def test_t03_block_length_ratio_is_heads_per_rank() -> None:
    cases = {
        (32, 4, 8): 2,
        (8, 2, 4): 2,
        (8, 4, 8): 2,
        (8, 2, 8): 4,
        (8, 8, 16): 1,
        (4, 4, 8): 1,
        (2, 4, 8): 1,
        (4, 2, 8): 2,
    }
    for (heads, remote, local), ratio in cases.items():
        assert topology(0, local, heads).block_len_ratio(remote) == ratio
        assert topology(0, local, heads).tp_ratio(remote) == Fraction(local, remote)
    bytes_of = [heads * 64 * 32 * 2 for heads in (held(0, 2, 4)[1], held(0, 8, 4)[1])]
    assert bytes_of == [8192, 4096]


def test_kernel_block_ids_use_the_ratio_that_is_given() -> None:
    assert logical_to_kernel_block_ids(([0, 1, 2], [3, 4]), 2) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert logical_to_kernel_block_ids(([0, 1, 2], [3, 4]), 1) == [[0, 1, 2], [3, 4]]
    expanded = logical_to_kernel_block_ids([[0, 1, 2], [10, 11]], 261, kernel_blocks=2, state_groups=[1])
    assert expanded == [[0, 1, 261, 262, 522, 523], [10, 11]]


def test_t11_and_t12_kernel_pages() -> None:
    assert logical_to_kernel_block_ids([[0, 5, 1817]], 2, num_blocks=1818) == [[0, 1, 10, 11, 3634, 3635]]
    with pytest.raises(BindError, match=r"block id 1818 is not in \[0, 1818\)"):
        logical_to_kernel_block_ids([[0, 1818]], 2, num_blocks=1818)
    assert logical_to_kernel_block_ids([[2]], 12) == [list(range(24, 36))]


@pytest.mark.parametrize("ratio,taken", [(0, None), (2, 3), (2, 0)])
def test_impossible_ratios_are_refused(ratio: int, taken: int | None) -> None:
    with pytest.raises(BindError, match="ratio is"):
        logical_to_kernel_block_ids([[1]], ratio, kernel_blocks=taken)


def test_topology_registers_once_and_names_what_it_knows() -> None:
    here = topology(1, 2, 4)
    info = EngineTransferInfo(remote_tp_size=4, remote_block_len=4096, remote_block_size=32)
    other = EngineTransferInfo(remote_tp_size=8, remote_block_len=4096, remote_block_size=32)
    assert here.register_remote_engine("p", info) is info
    assert here.register_remote_engine("p", other) is info
    assert here.get_engine_info("p") is info
    assert not here.replicates_kv_cache("p")
    with pytest.raises(SessionError, match=r"'q' stage 0 is not registered; known: \[\('p', 0\)\]"):
        here.get_engine_info("q")
    with pytest.raises(SessionError, match="is this engine"):
        here.register_remote_engine("here", info)
    here.unregister_remote_engine("p")
    here.unregister_remote_engine("p")
    with pytest.raises(SessionError, match="known: none"):
        here.get_engine_info("p")


def test_topology_refuses_sizes_that_make_no_sense() -> None:
    with pytest.raises(LayoutError, match=r"tp_rank 2 is not in \[0, 2\)"):
        topology(2, 2, 4)
    with pytest.raises(LayoutError, match="remote_tp_size is 0"):
        EngineTransferInfo(remote_tp_size=0, remote_block_len=1, remote_block_size=1)


def test_conv_split_is_read_off_the_declaration() -> None:
    spec = Mamba2Spec(name="l", num_heads=16, head_dim=32, state_size=64, num_groups=1)
    (page,) = spec.pages(Place(0, 0, 2), CacheGeometry(conv_layout="DS"))
    split = MambaConvSplitInfo.of_page(page)
    assert split.local_proj_dims == (256, 64, 64)
    assert split.ssm_sizes == (3 * 384 * 2, 8 * 32 * 64 * 4)
    assert split.local_conv_dim == 384
    assert split.local_conv_offsets == [(0, 1536), (1536, 384), (1920, 384)]


def test_the_transfer_plan_gives_reads_per_source_rank() -> None:
    space = AddressSpace()
    remote, local = attention_engine("p", 4, 4, space), attention_engine("d", 3, 4, space, block_size=6)
    plan = generate_engine_transfer_plan(remote, local, 1)
    assert plan.source_ranks == (1, 2)
    reads = plan.read_specs([BlockTable(0, (5, 2, 7))], [BlockTable(6, (3,))], num_tokens=12)
    assert [read.remote_rank for read in reads] == [1, 2]
    assert reads[0].remote_block_ids == ((5, 2, 7),)
    assert reads[0].local_block_ids == ((3,),)
    assert sum(read.descriptors.total_bytes for read in reads) == 6 * 2 * 2 * 2 * 2


def test_unknown_kinds_of_groups_are_refused_not_taken_for_replicated() -> None:
    with pytest.raises(LayoutError, match="'mamba' is not known; known: attention, mla, state"):
        compute_tp_mapping(topology(0, 2, 4), 4, ("attention", "mamba"))  # type: ignore[arg-type]


def test_heads_of_a_rank_are_those_of_its_dcp_group() -> None:
    here = TransferTopology(3, 4, 16, "here", is_mla=False, is_mamba=False, total_num_kv_heads=8, dcp_size=2)
    assert here.local_physical_heads == 4


def test_every_name_of_the_field_is_at_the_front_door() -> None:
    here = kvplan.TransferTopology(0, 2, 16, "here", False, False, 8)
    info = kvplan.EngineTransferInfo(4, 4096, 16)
    assert kvplan.register_remote_engine(here, "there", info) is info
    assert here.get_engine_info("there") is info
    names = "compute_tp_mapping TPMapping ReadSpec generate_engine_transfer_plan EngineTransferPlan"
    names += " logical_to_kernel_block_ids MambaConvSplitInfo"
    assert set(names.split()) <= set(kvplan.__all__)
