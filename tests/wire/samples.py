"""One message of every kind, with every optional field set. Shared by the codec tests and the golden files."""

from kvplan.planner import Axis, BlockLayout, ComponentLayout, EngineLayout, RankLayout, Region, Span
from kvplan.wire.digests import ComponentDigest, Digest, Digested, DigestRefused, ScopeItem, TableItem
from kvplan.wire.layouts import to_body
from kvplan.wire.messages import (
    Claim,
    ClaimItem,
    Done,
    DoneAck,
    DoneItem,
    Error,
    Granted,
    GrantItem,
    Hello,
    HelloRefused,
    HelloRequest,
    Introduce,
    Introduced,
    IntroduceRefused,
    NotReady,
    Party,
    RankCard,
    Reference,
    RefusalItem,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
)
from kvplan.wire.status import FailureLine, LeaseLine, PeerLine, RankAddress, ReadLine, Status, StatusRequest


def small_layout(engine_id="decode-0"):
    """Two ranks, two layers: heads 0-1 and 2-3, blocks of 48 tokens with stride 261 beyond the bytes."""
    ranks = []
    for tp in range(2):
        heads = Axis("kv_head", (Span(2 * tp, 2 * tp + 2, 0, 48 * 64),))
        tokens = Axis("token", (Span(0, 48, 0, 64),))
        block = BlockLayout((heads, tokens), 64, "bfloat16[32]", 0, 48)
        state = BlockLayout((Axis("width", (Span(-3, 0, 0, 16),)),), 16, "float32[4]", 32, None)
        stride = 2 * 48 * 64 + 261
        regions = tuple(Region((1 << 40) * (tp + 1) + i * 100 * stride, 100, stride) for i in range(2))
        components = (
            ComponentLayout("layer.0", "k", 0, 0, block),
            ComponentLayout("layer.1", "k", 0, 1, block),
            ComponentLayout("layer.2", "conv", 1, 1, state, optional=True),
        )
        ranks.append(RankLayout(regions, components, tp=tp))
    return EngineLayout(engine_id, tuple(ranks))


READER = Party("decode-0", 1)
BODY = to_body(small_layout())

MESSAGES = {
    "hello_request": HelloRequest(engine_id="decode-0"),
    "hello": Hello(
        engine_id="prefill-0",
        compatibility={"dtype": "bfloat16", "model": "tiny@1"},
        layout=BODY,
        ranks=(RankCard("10.0.0.1:4000", "nixl", b"\x00meta"), RankCard("10.0.0.1:4001", "nixl", b"\xff")),
    ),
    "not_ready": NotReady(detail="loading"),
    "hello_refused": HelloRefused(reason="draining", detail="ask another"),
    "introduce": Introduce(producer=Party("prefill-0", 0), engine_id="decode-0", layout=BODY),
    "introduced": Introduced(producer=Party("prefill-0", 0), engine_id="decode-0"),
    "introduce_refused": IntroduceRefused(
        producer=Party("prefill-0", 0), engine_id="decode-0", reason="incompatible", detail="no layer in common"
    ),
    "claim": Claim(
        reader=READER, items=(ClaimItem("cmpl-1", "g1", "local-1", "d1"), ClaimItem("cmpl-2", "g2", "local-2"))
    ),
    "granted": Granted(reader=READER, items=(GrantItem("cmpl-1", "g1", 20.0, "local-1"),)),
    "refused": Refused(reader=READER, items=(RefusalItem("cmpl-2", "g2", "expired", "30 s ago", "local-2"),)),
    "renew": Renew(reader=READER, number=7, items=(Reference("cmpl-1", "g1"),)),
    "renewed": Renewed(
        reader=READER,
        number=7,
        items=(GrantItem("cmpl-1", "g1", 20.0),),
        lost=(RefusalItem("cmpl-3", "g3", "released"),),
    ),
    "done": Done(reader=READER, items=(DoneItem("cmpl-1", "g1", "local-1", ok=True),)),
    "done_ack": DoneAck(reader=READER, items=(DoneItem("cmpl-1", "g1", "local-1", ok=True),)),
    "release": Release(reader=READER, items=(Reference("cmpl-4", "g4"),)),
    "released": Released(reader=READER, items=(Reference("cmpl-4", "g4"),)),
    "hello_with_features": Hello(
        engine_id="prefill-0",
        compatibility={"dtype": "bfloat16"},
        layout=BODY,
        ranks=(RankCard("10.0.0.1:4000", "nixl", b"\x00meta"), RankCard("10.0.0.1:4001", "nixl", b"\xff")),
        features=("digest",),
    ),
    "digest": Digest(
        engine_id="decode-0",
        rank=1,
        number=9,
        request_id="cmpl-1",
        generation="g1",
        ticket="local-1",
        tables=(TableItem(32, (7, 3)), TableItem(0, (5, -1))),
        scope=ScopeItem("layer.0", "k", 2, 16, 48),
    ),
    "digested": Digested(
        engine_id="decode-0",
        rank=1,
        number=9,
        components=(ComponentDigest("layer.0", "k", (1 << 64) - 1), ComponentDigest("layer.2", "conv", 0)),
        parts=(1, 1 << 63),
        total=2,
    ),
    "digest_refused": DigestRefused(
        engine_id="decode-0", rank=1, number=9, reason="not_claimed", detail="the lease has ended"
    ),
    "status_request": StatusRequest(),
    "status": Status(
        role="rank",
        engine_id="decode-0",
        rank=1,
        num_ranks=2,
        version="0.1.0",
        protocol=1,
        uptime_s=12.5,
        host="node-7",
        pid=4711,
        transport="nixl",
        facts={"info.model": "tiny"},
        ranks=(RankAddress("10.0.0.1:4000", "nixl"),),
        values={"reads": 3.0, "failures.expired": 1.0},
        peers=(PeerLine("prefill-0", "10.0.0.2:5600", "ready", 1, "fine"),),
        reads=(ReadLine("local-1", "prefill-0", "reading", "bytes", 0.25, 4096, 1024),),
        leases=(LeaseLine("cmpl-9", "claimed", "decode-1", 17.5, 1, 2),),
        failures=(FailureLine(3.5, "local-0", "prefill-0", "10.0.0.2:5600", "expired", "30 s ago"),),
    ),
    "error": Error(reason="unexpected", detail="not here"),
}
