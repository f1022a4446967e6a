"""A town of engines without threads, sockets or real time: every message passes through ``Town.deliver``.

Messages are encoded and decoded on their way. ``Town.faults`` may lose, repeat or hold back any of them; transports
are memory transports whose batches end when the test says so. So every interleaving can be played, and replayed.
"""

from __future__ import annotations

from collections import deque

from kvplan.planner import BlockTable
from kvplan.session import Identity, Offer, ReadRequest, RemoteRef, SessionConfig
from kvplan.session.consumer import Consumer
from kvplan.session.producer import Producer
from kvplan.session.stats import Stats
from kvplan.session.worker import Hands, at_once
from kvplan.testing.clock import FakeClock
from kvplan.testing.oracle import UNTOUCHED, check_moved, write_coordinates
from kvplan.testing.strategies import engine
from kvplan.transport import MemoryRange
from kvplan.transport.memory import MemoryTransport
from kvplan.wire.addresses import Address
from kvplan.wire.codec import decode, encode
from kvplan.wire.layouts import to_body
from kvplan.wire.messages import FEATURES, Hello, HelloRequest, NotReady, RankCard
from tests.session.engines import COMPATIBILITY, D_SHAPE, NUM_BLOCKS, P_SHAPE, TOTAL_HEADS, in_memory

HOST = "127.0.0.1"
DEAR_US = 1000.0
"""What a descriptor costs here: so much that even the smallest read is staged, where staging is on at all."""


class Rank:
    """One rank: producer, consumer, transport and memory."""

    def __init__(self, town, engine_name, index, num_ranks, memory, address, config, compatibility):
        self.town, self.memory, self.address = town, memory, address
        self.stats = Stats()
        self.hold = False
        self.transport = MemoryTransport(on_post=self._on_post)
        self.transport.register([MemoryRange(held.ctypes.data, held.nbytes) for held in memory.bytes])
        identity = Identity(engine_name, index, num_ranks, compatibility)
        self.submit = at_once
        """Does what takes long; a test may keep it waiting, or have no room for it."""
        self.scatter = at_once
        """Copies what was staged; the same holds."""
        hands, scatter = Hands(lambda job: self.submit(job)), Hands(lambda job: self.scatter(job))  # noqa: PLW0108 - late
        self.producer = Producer(identity=identity, config=config, stats=self.stats, hands=hands)
        self.consumer = Consumer(
            identity=identity, layout=memory.rank, config=config, stats=self.stats, transport=self.transport,
            send=lambda to, message: town.post(self, to, message),
            hang_up=lambda to: None, hands=hands, scatter=scatter,
        )  # fmt: skip
        self.on_post = None
        self.results = {"sent": [], "received": [], "failed": {}}

    def _on_post(self, batch):
        from kvplan.transport.base import State

        verdict = self.on_post(batch) if self.on_post else None
        return verdict if verdict is not None else State.PENDING if self.hold else None

    def collect(self):
        results = self.consumer.take_results()
        self.results["sent"] += sorted(self.producer.offers.take_sent())
        self.results["received"] += sorted(results.received)
        for name, failure in results.failed.items():
            assert name not in self.results["failed"], f"{name} failed twice"
            assert name not in self.results["received"], f"{name} received and failed"
            self.results["failed"][name] = failure


class Engine:
    """All ranks of an engine and its front desk's answer."""

    def __init__(self, town, name, shape, port, *, config, compatibility=None, num_layers=1):
        self.town, self.name, self.block_size = town, name, shape.block_size
        layout = engine(name, shape, TOTAL_HEADS, num_layers=num_layers, num_blocks=NUM_BLOCKS, base=1 << 20)
        self.layout, self.memories = in_memory(layout)
        self.desk = Address(HOST, port)
        self.compatibility = COMPATIBILITY if compatibility is None else compatibility
        self.ready = True
        count = len(layout.ranks)
        self.ranks = [
            Rank(town, name, i, count, memory, Address(HOST, port + 1 + i), config, self.compatibility)
            for i, memory in enumerate(self.memories)
        ]
        self.hello = Hello(
            engine_id=name,
            compatibility=self.compatibility,
            layout=to_body(self.layout),
            ranks=tuple(RankCard(str(rank.address), "memory", rank.transport.metadata()) for rank in self.ranks),
            features=FEATURES,
        )
        for rank in self.ranks:
            rank.producer.learn_own(self.layout)
            rank.consumer.set_own_desk(self.desk)

    def table(self, num_tokens, *, first_block=1, first_token=0):
        count = -(-num_tokens // self.block_size) - first_token // self.block_size
        return (BlockTable(first_token, tuple(range(first_block, first_block + count))),)

    def fill(self, tables):
        for memory in self.memories:
            write_coordinates(memory, tables)

    def scribble(self, tables, value=0x55):
        """Write over a request's blocks, as a later request would."""
        for memory in self.memories:
            for region, held in zip(memory.rank.regions, memory.bytes, strict=True):
                for block in tables[0].block_ids:
                    held[block * region.block_stride_bytes : (block + 1) * region.block_stride_bytes] = value

    def offer(self, request_id, tables, num_tokens, *, generation="g1", lease_s=0.0, ranks=None):
        for index in range(len(self.ranks)) if ranks is None else ranks:
            rank = self.ranks[index]
            answers = rank.producer.offer(Offer(request_id, generation, tables, num_tokens, lease_s), self.town.clock())
            self.town.answer(rank, answers)
        return self.reference(request_id, tables, num_tokens, generation=generation)

    def reference(self, request_id, tables, num_tokens, *, generation="g1"):
        return RemoteRef(self.name, self.desk.host, self.desk.port, request_id, generation, tables, num_tokens)

    def read(self, request_id, remote, tables, *, ranks=None):
        for index in range(len(self.ranks)) if ranks is None else ranks:
            self.ranks[index].consumer.read(ReadRequest(request_id, remote, tables), self.town.clock())

    def each(self, action):
        for rank in self.ranks:
            action(rank.consumer, self.town.clock())

    def check(self, tables, num_tokens):
        for memory in self.memories:
            check_moved(memory, tables, lambda token: token is None or token < num_tokens)

    def is_clean(self):
        return all((held == UNTOUCHED).all() for memory in self.memories for held in memory.bytes)

    def outcome(self, request_id):
        """What each rank has reported about a read, None for nothing yet."""
        found = []
        for rank in self.ranks:
            rank.collect()
            failure = rank.results["failed"].get(request_id)
            received = request_id in rank.results["received"]
            found.append(failure.reason if failure else "received" if received else None)
        return found

    def sent(self, request_id):
        for rank in self.ranks:
            rank.collect()
        return [rank.results["sent"].count(request_id) for rank in self.ranks]

    def count(self, name):
        return sum(rank.stats.snapshot()[name] for rank in self.ranks)


class Town:
    """Engines, the mail between them, and the time."""

    def __init__(self, **options):
        self.clock = FakeClock(1000.0)
        self.config = SessionConfig(**{"staging_bytes": 0, "descriptor_us": DEAR_US, **options})
        self.engines = []
        self.mail = deque()
        self.sent_messages = []
        self.faults = None
        """Takes (sender, to, message) and returns how often the message arrives; None is once."""
        self.by_address = {}

    def build(self, name, shape, port, **options):
        new = Engine(self, name, shape, port, config=options.pop("config", self.config), **options)
        self.engines.append(new)
        self.by_address[new.desk] = new
        for rank in new.ranks:
            self.by_address[rank.address] = rank
        return new

    def pair(self, p_shape=P_SHAPE, d_shape=D_SHAPE, **options):
        return self.build("P", p_shape, 5000, **options), self.build("D", d_shape, 5100)

    def kill(self, victim):
        """End an engine: nobody answers at its addresses, its transports are closed."""
        self.engines.remove(victim)
        for address in [a for a, where in self.by_address.items() if where is victim or where in victim.ranks]:
            del self.by_address[address]
            for other in self.engines:
                for rank in other.ranks:
                    rank.consumer.line_changed(address, self.clock(), is_up=False)
        for rank in victim.ranks:
            rank.transport.close()

    def post(self, sender, to, message):
        self.sent_messages.append((to, message))
        for _ in range(self._copies(sender, to, message)):
            self.mail.append((sender, to, encode(message)))

    def answer(self, rank, answers):
        for answer in answers:
            consumer_rank = self._routes()[answer.route]
            for _ in range(self._copies(rank, consumer_rank.address, answer.message)):
                self.mail.append((rank, consumer_rank, encode(answer.message)))

    def settle(self, *, ticks=60):
        """Deliver and tick, without time passing, until nothing happens any more."""
        for _ in range(ticks):
            before = len(self.sent_messages)
            for place in self.engines:
                for rank in place.ranks:
                    rank.consumer.tick(self.clock())
                    self.answer(rank, rank.producer.tick(self.clock()))
            now = self.clock()
            due = any(rank.consumer.next_deadline(now) <= now for place in self.engines for rank in place.ranks)
            if not self.mail and not due and len(self.sent_messages) == before:
                return
            while self.mail:
                self._deliver(*self.mail.popleft())
        raise AssertionError("the town does not come to rest")

    def run(self, seconds, *, step_s=0.25):
        """Let time pass in steps, settling after each."""
        self.settle()
        ends_at = self.clock() + seconds
        while self.clock() < ends_at:
            self.clock.advance(min(step_s, ends_at - self.clock()))
            self.settle()

    def _copies(self, sender, to, message):
        copies = self.faults(sender, to, message) if self.faults else None
        return 1 if copies is None else copies

    def _routes(self):
        return {str(rank.address).encode(): rank for place in self.engines for rank in place.ranks}

    def _deliver(self, sender, to, frame):
        message, now = decode(frame), self.clock()
        if isinstance(to, Rank):
            to.consumer.hear(sender.address, message, now)
            return
        where = self.by_address.get(to)
        if where is None:
            sender.consumer.line_changed(to, now, is_up=False)
        elif isinstance(where, Engine):
            assert isinstance(message, HelloRequest)
            sender.consumer.hear(to, where.hello if where.ready else NotReady(detail="loading"), now)
        else:
            self.answer(where, where.producer.handle(str(sender.address).encode(), message, now))
