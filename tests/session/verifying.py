"""Two hybrid engines whose reads are verified, content by name, and carriers that can be told to lie."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import re
from contextlib import contextmanager

from kvplan.testing.corruption import CorruptingTransport
from kvplan.transport import create
from tests.session.atoms import atoms_of, content, fine_components
from tests.session.engines import QUICK, Engine, wait_until
from tests.session.hybrids import declared, tables
from tests.session.prefill_process import PrefillProcess, fill

VERIFY = dataclasses.replace(QUICK, verify_rate=1.0, verify_timeout_s=8.0)
NUM_TOKENS = 130

PARALLEL = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 3)]
BLOCKS = [(32, 32), (32, 64), (64, 32), (96, 64)]
LAYOUTS = [(a, b) for a in ("HND", "NHD", "TRANSPOSED") for b in ("HND", "NHD", "TRANSPOSED")]
KINDS = ("byte", "head", "block", "layer")

WRONG = re.compile(
    r"layer '(?P<layer>[^']*)' component '(?P<component>[^']*)' (?P<where>[^:]*): the (?P<size>\d+) bytes at "
    r"(?P<here>0x[0-9a-f]+) of rank (?P<reader>\d+) of engine decode-0 are not those at (?P<there>0x[0-9a-f]+) of rank "
    r"(?P<source>\d+) of engine prefill-0; (?P<differ>\d+) of \d+ components from that rank differ"
)
"""What a person is told about a wrong byte."""


def combinations():
    """Return every combination of parallel sizes, block sizes and layouts, each as (prefill, decode) knobs."""
    packings = ("split", "packed", "interleaved")
    for i, (tp, block, layout) in enumerate(itertools.product(PARALLEL, BLOCKS, LAYOUTS)):
        packing = (packings[i % 3], packings[(i + 1) % 3])
        yield tuple(
            {"tp": tp[side], "block_size": block[side], "kv_layout": layout[side], "kv_packing": packing[side]}
            for side in (0, 1)
        )


class World:
    """A prefill and a decode engine of the same hybrid model; in two processes unless the transport is "memory"."""

    def __init__(self, prefill_knobs, decode_knobs, *, transport="memory", seed=0, first_token=0, config=VERIFY):
        self.random = random.Random(seed)
        (p_layout, p_block), (d_layout, d_block) = declared("prefill-0", **prefill_knobs), declared(
            "decode-0", **decode_knobs)  # fmt: skip
        options = {"config": config, "make_transport": lambda: CorruptingTransport(create(transport))}
        self.decode = Engine("decode-0", None, layout=d_layout, **options)
        self.source = tables(NUM_TOKENS, p_block)
        self.destination = tables(NUM_TOKENS, d_block, first_block=2, first_token=first_token * d_block)
        fine = fine_components(p_layout, d_layout)
        if transport == "memory":
            self.prefill = Engine("prefill-0", None, layout=p_layout, **options)
            fill(self.prefill.memories, self.source, NUM_TOKENS, fine)
        else:
            self.prefill = PrefillProcess(
                prefill_knobs, decode_knobs, transport=transport, num_tokens=NUM_TOKENS, config=config
            )
        self.here = [atoms_of(m.rank, self.source, NUM_TOKENS, fine) for m in self.prefill.memories]
        self.there = [atoms_of(m.rank, self.destination, NUM_TOKENS, fine) for m in self.decode.memories]
        self.num_reads = 0

    def read(self):
        """Read the request once; return the reasons by rank."""
        self.num_reads += 1
        name = f"r{self.num_reads}"
        self.decode.wipe()
        self.decode.read(name, self.prefill.offer(name, self.source, NUM_TOKENS), self.destination)
        reasons = wait_until(lambda: self.decode.failures(name), what="the end of a read")
        wait_until(lambda: self.prefill.sent(name), what="sent")
        return reasons

    def detail(self, rank):
        """Return what was said about the last read of a rank."""
        return self.decode.done["failed"][rank][f"r{self.num_reads}"].detail

    def spoil(self, kind, rank):
        """Let one read of a rank bring something wrong; return a word on what."""
        carrier = self.decode.transports[rank]
        component = self.random.choice(sorted({key[:2] for key in self.there[rank]}))
        key = self.random.choice([key for key in self.there[rank] if key[:2] == component])
        peers = [(f"prefill-0/{i}", atoms, self.prefill.memories[i].rank) for i, atoms in enumerate(self.here)]
        for peer, atoms, layout in peers:
            if kind == "byte" and key in atoms:
                address, size = atoms[key]
                carrier.corrupt(peer, address + self.num_reads % size)
            elif kind == "head":
                same = [at for other, at in atoms.items() if other[:2] == key[:2] and other[2][:-1] == key[2][:-1]]
                for address, size in same:
                    carrier.corrupt(peer, address, size)
            elif kind == "block" and key in atoms:
                base, stride = _block_of(layout, atoms[key][0])
                carrier.corrupt(peer, base, stride)
            elif kind == "layer":
                for region in {item.region for item in layout.components if item.layer == key.layer}:
                    carrier.corrupt(peer, layout.regions[region].base, layout.regions[region].num_bytes)
        return f"{kind} at {key}"

    def heal(self):
        for carrier in self.decode.transports:
            carrier.heal()

    def wrong(self, rank):
        """Return the keys of a rank's atoms that do not hold their content, in the order in which people are told."""
        places = {item.key: i for i, item in enumerate(self.decode.memories[rank].rank.components)}
        held = {key: ctypes.string_at(*place) for key, place in self.there[rank].items()}
        bad = [key for key, value in held.items() if value != content(key, len(value))]
        return sorted(bad, key=lambda key: (places[key[:2]], [x for _, x in key.coordinates]))

    def check_named(self, rank):
        """Check that a rank's failure names the first wrong atom, both ranks and both addresses."""
        wrong = self.wrong(rank)
        assert wrong, "nothing is wrong"
        told = WRONG.match(self.detail(rank))
        assert told, self.detail(rank)
        where = tuple((name, int(x)) for name, x in (part.split() for part in told["where"].split(", ")))
        first = wrong[0]
        assert (told["layer"], told["component"], where) == first
        assert int(told["reader"]) == rank
        assert (int(told["here"], 16), int(told["size"])) == self.there[rank][first]
        assert (int(told["there"], 16), int(told["size"])) == self.here[int(told["source"])][first]
        assert int(told["differ"]) <= len({key[:2] for key in wrong})

    def close(self):
        self.decode.close()
        self.prefill.close()


def _block_of(layout, address):
    """Return base and bytes of the block that an address is in."""
    for region in layout.regions:
        if region.base <= address < region.base + region.num_bytes:
            stride = region.block_stride_bytes
            return region.base + (address - region.base) // stride * stride, stride
    raise AssertionError(f"{address:#x} is in no region")


@contextmanager
def world(prefill_knobs, decode_knobs, **options):
    """Yield a running world."""
    made = World(prefill_knobs, decode_knobs, **options)
    made.prefill.start()
    made.decode.start()
    try:
        yield made
    finally:
        made.close()
