"""Digests: one number for one content, however it is laid out and divided; another for any other content."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.errors import BindError, SessionError, UnsupportedError
from kvplan.planner import BlockTable, PairPlan, bind, plan_engines
from kvplan.session import digest
from kvplan.session.digest import Scope, Share, bounds, digests, spot, whole
from kvplan.testing.oracle import Memory, apply, write_coordinates
from kvplan.testing.strategies import Shape, engine, requests, shapes
from tests.session.engines import in_memory
from tests.session.hybrids import hybrid, tables

TOKENS = 40

P = {"tp": 1, "block_size": 8}
KNOBS = {
    "same": ({**P}, {**P}),
    "tp-2-blocks-12": ({**P}, {"tp": 2, "block_size": 12}),
    "nhd": ({**P, "kv_layout": "NHD"}, {"tp": 3, "block_size": 8, "kv_packing": "packed"}),
    "kernel-blocks": ({"tp": 4, "block_size": 16, "kernel_block_size": 4}, {**P, "kv_packing": "interleaved"}),
    "stages": ({"tp": 2, "pp": 2, "block_size": 16}, {"pp": 4, "block_size": 8, "kv_layout": "NHD"}),
    "across-layers": ({"tp": 3, "block_size": 8, "kv_packing": "blocks_first"}, {"tp": 2, "block_size": 20}),
    "convolutions": ({"tp": 2, "block_size": 8, "conv_layout": "DS"}, {"tp": 4, "block_size": 8}),
}
"""Every strand is whole on some rank, and no rank gets a copy of what another has; except the latent of one head."""
OTHERS = {
    "elements": ({**P, "kv_layout": "TRANSPOSED"}, {"tp": 2, "block_size": 12}),
    "elements-on-both": ({**P, "kv_layout": "TRANSPOSED"}, {"tp": 3, "block_size": 16, "kv_layout": "TRANSPOSED"}),
    "context": ({"tp": 4, "dcp": 2, "block_size": 8}, {"tp": 2, "block_size": 12}),
    "border-heads": ({"tp": 4, "block_size": 8}, {"tp": 5, "block_size": 8}),
}


class Moved(NamedTuple):
    """One pair of ranks after the move. Memory lives as long as somebody holds this."""

    source: Share
    destination: Share
    memory: Memory
    """Of the destination rank."""
    keep: object


def moved(knobs, num_tokens=TOKENS, first_token=0):
    """Return every pair of ranks of two hybrid engines, after the move."""
    found = []
    source, here, s_block = hybrid("p", **knobs[0])
    destination, there, d_block = hybrid("d", **knobs[1])
    s, d = tables(num_tokens, s_block), tables(num_tokens, d_block, first_block=2, first_token=first_token)
    for memory in here:
        write_coordinates(memory, s)
    for pair in plan_engines(source, destination).pairs:
        runs = bind(pair, s, d, num_tokens=num_tokens, whole_blocks=True)
        apply(runs, here[pair.source_rank], there[pair.destination_rank])
        shares = [Share(pair, side, s, d, num_tokens) for side in ("source", "destination")]
        found.append(Moved(*shares, there[pair.destination_rank], (here, there)))
    return found


def total(shares):
    """Return the digest of all shares together, every (layer, component) counted once per holder."""
    return sum(whole(digests(share, Scope()).components) for share in shares) & digest.MASK


@pytest.mark.parametrize("name", [*KNOBS, *OTHERS])
def test_both_sides_of_every_pair_agree_on_every_component(name):
    knobs = {**KNOBS, **OTHERS}[name]
    for source, destination, *_ in moved(knobs):
        ours, theirs = digests(source, Scope()), digests(destination, Scope())
        assert ours == theirs
        assert ours.total == len(ours.components) > 0
        assert all(ours.components.values())


def test_a_request_has_one_digest_however_it_is_laid_out_and_divided():
    found = {}
    for name, knobs in KNOBS.items():
        sums = Counter()
        for own in moved(knobs):
            sums.update(digests(own.source, Scope()).components)
        found[name] = {key: value & digest.MASK for key, value in sums.items() if key[1] != "latent"}
    assert found == dict.fromkeys(KNOBS, found["same"])


def test_shares_of_all_sources_are_the_shares_of_all_destinations():
    for knobs in [*KNOBS.values(), *OTHERS.values()]:
        pairs = moved(knobs)
        assert total(own.source for own in pairs) == total(own.destination for own in pairs) != 0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_two_engines_agree_and_any_changed_byte_is_found(data):
    left, right = data.draw(shapes(max_parallel=4, max_block=12)), data.draw(shapes(max_parallel=4, max_block=12))
    source, here = in_memory(engine("p", left, 6, num_layers=2, num_blocks=5, base=4096))
    destination, there = in_memory(engine("d", right, 6, num_layers=2, num_blocks=5, base=1 << 40))
    num_tokens, s, d = data.draw(requests(left.block_size, right.block_size, num_blocks=5))
    for memory in here:
        write_coordinates(memory, [s])
    pairs = plan_engines(source, destination).pairs
    for pair in pairs:
        apply(bind(pair, [s], [d], num_tokens=num_tokens, whole_blocks=False), here[pair.source_rank],
              there[pair.destination_rank])  # fmt: skip
        ours, theirs = (Share(pair, side, [s], [d], num_tokens) for side in ("source", "destination"))
        assert digests(ours, Scope()) == digests(theirs, Scope())
    pair = data.draw(st.sampled_from(pairs))
    runs = bind(pair, [s], [d], num_tokens=num_tokens, whole_blocks=False)
    at = data.draw(st.integers(0, len(runs) - 1))
    byte = int(runs.destination_address[at]) + data.draw(st.integers(0, int(runs.num_bytes[at]) - 1))
    there[pair.destination_rank].view(byte, 1)[:] ^= data.draw(st.integers(1, 255))
    ours, theirs = (Share(pair, side, [s], [d], num_tokens) for side in ("source", "destination"))
    found = descend(ours, theirs)
    assert found.address <= byte < found.address + found.num_bytes


def descend(ours, theirs):
    """Return the destination's first wrong atom, by questions as two processes would ask them."""
    a, b = digests(ours, Scope()), digests(theirs, Scope())
    layer, component = next(key for key in a.components if a.components[key] != b.components[key])
    strand = narrow(ours, theirs, Scope(layer, component))
    token = narrow(ours, theirs, Scope(layer, component, strand))
    assert spot(ours, layer, component, strand, token).coordinates == spot(
        theirs, layer, component, strand, token).coordinates  # fmt: skip
    return spot(theirs, layer, component, strand, token)


def narrow(ours, theirs, scope):
    while True:
        a, b = digests(ours, scope), digests(theirs, scope)
        edges = bounds(scope.first, a.total if scope.stop is None else scope.stop)
        bad = next(i for i, (x, y) in enumerate(zip(a.parts, b.parts, strict=True)) if x != y)
        if edges[bad + 1] - edges[bad] == 1:
            return edges[bad]
        scope = scope._replace(first=edges[bad], stop=edges[bad + 1])


def test_windows_do_not_show_at_the_edges_of_long_requests():
    left, right = Shape(1, 96, 96, "HND", "split"), Shape(2, 64, 32, "NHD", "packed")
    num_tokens = digest.WINDOW_TOKENS + 100
    source, here = in_memory(engine("p", left, 2, num_layers=1, num_blocks=50, base=4096))
    destination, there = in_memory(engine("d", right, 2, num_layers=1, num_blocks=70, base=1 << 40))
    rng = np.random.default_rng(3)
    s = BlockTable(0, rng.permutation(50)[: -(-num_tokens // 96)])
    d = BlockTable(0, rng.permutation(70)[: -(-num_tokens // 64)])
    for memory in here:
        for held in memory.bytes:
            held[:] = rng.integers(0, 256, len(held), dtype=np.uint8)
    for pair in plan_engines(source, destination).pairs:
        runs = bind(pair, [s], [d], num_tokens=num_tokens, whole_blocks=True)
        apply(runs, here[0], there[pair.destination_rank])
        ours, theirs = (Share(pair, side, [s], [d], num_tokens) for side in ("source", "destination"))
        assert digests(ours, Scope()) == digests(theirs, Scope())
        for token in (0, digest.WINDOW_TOKENS - 1, digest.WINDOW_TOKENS, num_tokens - 1):
            wrong = spot(theirs, "layer.0", "v", 0, token)
            assert wrong.coordinates == {"kv_head": pair.destination_rank, "token": token}
            there[pair.destination_rank].view(wrong.address, 1)[:] ^= 1
            assert descend(ours, theirs) == wrong
            there[pair.destination_rank].view(wrong.address, 1)[:] ^= 1


def test_what_is_not_moved_does_not_count():
    """Tokens that the destination has already, and those behind the end of the request."""
    for source, destination, memory, _ in moved(KNOBS["tp-2-blocks-12"], num_tokens=29, first_token=12):
        before = digests(destination, Scope())
        assert before == digests(source, Scope())
        address = spot(destination, "model.layers.0.attn", "k", 0, 0).address
        assert spot(destination, "model.layers.0.attn", "k", 0, 0).coordinates["token"] == 12
        memory.view(address - 8, 8)[:] ^= 255
        last = spot(destination, "model.layers.0.attn", "v", 0, 16)
        assert last.coordinates["token"] == 28
        memory.view(last.address + 8, 8)[:] ^= 255
        assert digests(destination, Scope()) == before


def test_an_exchange_of_two_strands_is_found():
    for source, destination, memory, _ in moved(KNOBS["same"]):
        one, two = (spot(destination, "model.layers.1.mixer", "ssm", i, 0) for i in (3, 4))
        a, b = (memory.view(x.address, x.num_bytes) for x in (one, two))
        a[:], b[:] = b.copy(), a.copy()
        assert descend(source, destination) == one


def test_a_scope_that_is_not_there_is_refused():
    held = moved(KNOBS["same"])
    for scope in (
        Scope("model.layers.9.attn", "k"),
        Scope("model.layers.0.attn", "k", first=3, stop=3),
        Scope("model.layers.0.attn", "k", stop=13),
        Scope("model.layers.0.attn", "k", 12),
        Scope("model.layers.0.attn", "k", -1),
        Scope("model.layers.0.attn", "k", 0, 0, TOKENS + 1),
    ):
        with pytest.raises(BindError):
            digests(held[0].source, scope)


def test_memory_that_the_host_cannot_read_is_refused_unread():
    source, destination, *_keep = moved(KNOBS["same"])[0]
    parts = tuple(
        dataclasses.replace(part, source_regions=tuple(
            dataclasses.replace(region, device="cuda:1") for region in part.source_regions))
        for part in source.plan.parts
    )  # fmt: skip
    elsewhere = PairPlan(0, 0, parts)
    with pytest.raises(UnsupportedError, match="cuda:1"):
        digests(dataclasses.replace(source, plan=elsewhere), Scope())
    digests(dataclasses.replace(destination, plan=elsewhere), Scope())


def test_digests_that_nobody_wants_end_early():
    source, *_keep = moved(KNOBS["same"])[0]
    answers = iter([True, True, False])
    with pytest.raises(SessionError):
        digests(source, Scope(), is_wanted=lambda: next(answers))
    for scope in (Scope("model.layers.0.attn", "k"), Scope("model.layers.0.attn", "k", 0)):
        with pytest.raises(SessionError):
            digests(source, scope, is_wanted=lambda: False)
