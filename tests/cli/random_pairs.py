"""Random pairs of engine descriptions and a request: every kind, coprime TP, unequal blocks, PP, DCP, holes."""

from __future__ import annotations

import random
from typing import Any


def pair(seed: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return (source description, destination description, request), small enough for a brute-force check."""
    rng = random.Random(seed)
    layers, num_layers = model(rng)
    scaled = rng.random() < 0.2
    dtype = rng.choice(["auto", "fp8"])
    sides = [engine(rng, side, layers, num_layers, scaled=scaled, dtype=dtype) for side in ("p", "d")]
    if rng.random() < 0.2:
        draft = {
            "name": "draft.0.attn",
            "kind": "attention",
            "num_kv_heads": 2,
            "head_dim": 3,
            "draft": True,
            "group": 0,
        }
        if all(layer["kind"] not in (*STATE, "sliding_window") for layer in layers if layer["group"] == 0):
            sides[rng.randrange(2)]["model"]["layers"].append(draft)
    return sides[0], sides[1], request(rng, layers, *sides)


STATE = ("mamba1", "mamba2", "gdn")


def model(rng: random.Random) -> tuple[list[dict[str, Any]], int]:
    num_layers = rng.randint(1, 6)
    layers: list[dict[str, Any]] = []
    for group in range(rng.choice([1, 1, 2, 2, 3])):
        kind = rng.choice(["attention", "attention", "sliding_window", "mla", *STATE])
        common = {"group": group, "kind": kind, **sizes(rng, kind)}
        taken = sorted(rng.sample(range(num_layers), rng.randint(1, num_layers)))
        layers.append({"name": f"model.layers.{{{','.join(map(str, taken))}}}.g{group}", **common})
        if kind == "mla" and rng.random() < 0.5:
            keys = {"head_dim": rng.randint(1, 5), "quant_block_size": rng.choice([1, 2, None])}
            layers.append({"name": f"model.layers.{{{','.join(map(str, taken))}}}.x{group}", "group": group,
                           "kind": "indexer", **{k: v for k, v in keys.items() if v}})  # fmt: skip
    return layers, num_layers


def sizes(rng: random.Random, kind: str) -> dict[str, Any]:
    match kind:
        case "attention" | "sliding_window":
            own = {"num_kv_heads": rng.choice([1, 2, 3, 4, 6]), "head_dim": rng.randint(1, 5)}
            if rng.random() < 0.2:
                own["head_dim_v"] = rng.randint(1, 5)
            return own | ({"window": rng.randint(5, 30)} if kind == "sliding_window" else {})
        case "mla":
            return {"latent_dim": rng.randint(1, 9)}
        case "mamba1":
            return {"intermediate_size": rng.choice([4, 6, 12]), "state_size": rng.randint(1, 3), "conv_kernel": 4}
        case "mamba2":
            groups = rng.choice([1, 2, 4])
            heads = groups * rng.randint(1, 3)
            own = {"num_heads": heads, "num_groups": groups, "head_dim": rng.randint(1, 3)}
            return own | {"state_size": rng.randint(1, 3), "conv_kernel": rng.randint(2, 4)}
        case _:
            keys = rng.choice([1, 2, 4])
            own = {"num_k_heads": keys, "num_v_heads": keys * rng.randint(1, 2), "head_k_dim": rng.randint(1, 3)}
            return own | {"head_v_dim": rng.randint(1, 3)}


def engine(
    rng: random.Random, name: str, layers: list[dict[str, Any]], num_layers: int, *, scaled: bool, dtype: str
) -> dict[str, Any]:
    tp = rng.randint(1, 6)
    dcp = rng.choice([d for d in range(1, tp + 1) if tp % d == 0]) if rng.random() < 0.3 else 1
    pp = rng.randint(1, min(3, num_layers)) if rng.random() < 0.4 else 1
    block = rng.choice([2, 3, 4, 6, 8, 12])
    parallel: dict[str, Any] = {"tp": tp, "pp": pp, "dcp": dcp, "dcp_interleave": rng.choice(divisors(block))}
    if pp > 1 and rng.random() < 0.5:
        cuts = sorted(rng.sample(range(1, num_layers), pp - 1))
        parallel["pp_layers"] = [b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
    layout = rng.choice(["HND", "NHD", "TRANSPOSED"])
    cache: dict[str, Any] = {
        "block_size": block,
        "kernel_block_size": rng.choice(divisors(block)),
        "num_blocks": 120,
        "kv_layout": layout,
        "kv_packing": rng.choice(["split", "packed", "interleaved", "blocks_first"]),
        "conv_layout": rng.choice(["SD", "DS"]),
        "dtype": dtype,
        "shared_regions": rng.random() < 0.4,
    }
    if scaled:
        cache["scales"] = "beside" if layout == "TRANSPOSED" else rng.choice(["beside", "inside"])
    groups = {layer["group"] for layer in layers}
    if len(groups) > 1 and rng.random() < 0.5 and dcp == 1:
        own = rng.choice([2, 5, 8])
        cache["groups"] = {max(groups): {"block_size": own, "kernel_block_size": rng.choice(divisors(own))}}
    return {
        "engine_id": name,
        "model": {"num_layers": num_layers, "layers": list(layers)},
        "parallel": parallel,
        "cache": cache,
    }


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def tokens_per_block(side: dict[str, Any], group: int) -> int:
    own = side["cache"].get("groups", {}).get(group, {})
    return own.get("block_size", side["cache"]["block_size"]) * side["parallel"]["dcp"]


def request(
    rng: random.Random, layers: list[dict[str, Any]], source: dict[str, Any], destination: dict[str, Any]
) -> dict[str, Any]:
    num_tokens = rng.randint(1, 40)
    ids = [rng.sample(range(120), 120) for _ in range(2)]
    groups = []
    for group in range(max(layer["group"] for layer in layers) + 1):
        kinds = [layer["kind"] for layer in layers if layer["group"] == group]
        if kinds[0] in STATE:
            count = rng.choice([1, 1, 2])
            entry = {side: {"first_token": 0, "block_ids": [own.pop() for _ in range(count)]}
                     for side, own in zip(("source", "destination"), ids, strict=True)}  # fmt: skip
        else:
            window = next((layer["window"] for layer in layers if layer["group"] == group and "window" in layer), None)
            entry = {
                "source": table(rng, ids[0], tokens_per_block(source, group), num_tokens, window, cached=False),
                "destination": table(
                    rng, ids[1], tokens_per_block(destination, group), num_tokens, window, cached=True
                ),
            }
        groups.append(entry)
    return {"num_tokens": num_tokens, "groups": groups}


def table(
    rng: random.Random, ids: list[int], per_block: int, num_tokens: int, window: int | None, *, cached: bool
) -> dict[str, Any]:
    total = -(-num_tokens // per_block)
    first = 0 if window is None else max(0, num_tokens - window + 1) // per_block
    holes = rng.random() < 0.5
    start = rng.randint(first, total) if cached and rng.random() < 0.5 else (0 if holes else first)
    blocks = [-1 if holes and i < first else ids.pop() for i in range(start, total)]
    if cached and rng.random() < 0.2:
        blocks.append(ids.pop())
    return {"first_token": start * per_block, "block_ids": blocks}
