"""The MoE layer: 24 launches in one CUDA graph, each with its own routing, the weight copies in
turn, so that the L2 cache is cold; all contestants' graphs take turns, and before each replay the
L2 cache is filled with other, clean data. µs per launch, median of the replays. warm: launch 0 over
and over, from one weight copy. eager: no graph, host time included. cute_moe_programmatic: launches
that overlap each other's ends; all others, the floor's too, are launched in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import protocol as p
import tool
import torch
from contest import Advance, Contestant, Options, Result, eager, rows, take_turns
from floor import (
    EmptySpec,
    FloorSpec,
    empty_function,
    expected_sums,
    probe_contestant,
    samples,
)
from peers import Peer, find_peers

from cute_moe import reference
from cute_moe.kernels.moe.spec import MAX_TOKENS
from cute_moe.moe import alloc_scratchpad, mono_moe
from cute_moe.shapes import LayerShape

BASELINE_TOKENS = (1, 2, 4, 8)
QUICK_TOKENS, QUICK_ROUTINGS = (1, 8), ("uniform",)
OTHER_TOKENS, OTHER_ROUTINGS = (1, 2, 4, 8), ("uniform", "skewed")  # of the other shapes
COPY_BYTES = 1_500_000_000
E4M3_CODES = 254  # without the two of NaN
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Pool:
    """Weight copies in call order (w_up, s_up, w_down, s_down), and what the probe must see."""

    copies: list[tuple[torch.Tensor, ...]]
    up_samples: torch.Tensor
    down_samples: torch.Tensor
    spec: FloorSpec
    scratchpad: torch.Tensor
    shape: LayerShape


@dataclass(frozen=True)
class Case:
    """Inputs of the launches of one graph, and outputs of the references.

    `want`: in block-FP8 arithmetic; `meant`: in fp32, from activations that are never quantised.
    """

    tokens: int
    routing: str
    xs: list[torch.Tensor]
    logits: list[torch.Tensor]
    lists: list[list[int]]
    want: list[torch.Tensor]
    meant: list[torch.Tensor]
    copies: int
    shape: LayerShape

    def repeated(self) -> Case:
        """Launch 0 again and again, from one weight copy: the warm case."""
        count = len(self.xs)
        fields = (self.xs, self.logits, self.lists, self.want, self.meant)
        return Case(self.tokens, self.routing, *([f[0]] * count for f in fields), 1, self.shape)


def random_weights(shape: LayerShape, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(w_up, s_up, w_down, s_down) of random bytes, on the generator's device: made in no time.

    Every e4m3 code but NaN is as likely; scales that differ from block to block bring the weights
    to a standard deviation near WEIGHT_STD.
    """
    options = {"generator": generator, "device": generator.device}
    codes = torch.arange(E4M3_CODES // 2, dtype=torch.uint8).view(reference.E4M3).float()
    mean_scale = WEIGHT_STD / float(codes.square().mean().sqrt())

    def draw(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (shape.num_experts, rows, columns)
        weights = torch.randint(0, E4M3_CODES, size, dtype=torch.uint8, **options)
        weights += weights >= E4M3_CODES // 2  # the sign comes behind the first code of NaN
        blocks = (size[0], rows // reference.BLOCK, columns // reference.BLOCK)
        scales = mean_scale * (torch.rand(blocks, **options) + 0.5)
        return weights.view(reference.E4M3), scales

    k, n = shape.hidden, shape.intermediate
    return (*draw(2 * n, k), *draw(k, n))


def make_pool(copies: int, shape: LayerShape = p.SHAPE, seed: int = 0) -> Pool:
    """Random weights; the copies are equal and lie apart."""
    torch.cuda.empty_cache()  # of the shape before
    weights = random_weights(shape, torch.Generator("cuda").manual_seed(seed))
    spec = FloorSpec.of(shape, tool.facts().sm_count)
    sizes = ("num_experts", "hidden", "intermediate", "top_k")
    return Pool(
        copies=[weights, *(tuple(t.clone() for t in weights) for _ in range(copies - 1))],
        up_samples=samples(weights[0], spec.up_chunks),
        down_samples=samples(weights[2], spec.down_chunks),
        spec=spec,
        scratchpad=alloc_scratchpad("cuda", **{name: getattr(shape, name) for name in sizes}),
        shape=shape,
    )


def make_case(pool: Pool, tokens: int, routing: str) -> Case:
    """Inputs of LAUNCHES launches; the references compute the tokens of all of them at once."""
    device = pool.copies[0][0].device
    generator = torch.Generator(device).manual_seed(1000 * tokens + p.ROUTINGS.index(routing))
    logits = p.draw_logits(tokens, routing, p.LAUNCHES, generator, pool.shape)
    options = {"generator": generator, "device": device}
    xs = [torch.randn(tokens, pool.shape.hidden, **options).bfloat16() for _ in logits]
    lists = [p.active_experts(router, pool.shape.top_k) for router in logits]
    together = (torch.cat(xs), torch.cat(logits), *pool.copies[0], pool.shape.top_k)
    layers = (reference.moe_block_fp8, reference.moe_fp32)
    want, meant = (list(layer(*together).split(tokens)) for layer in layers)
    return Case(tokens, routing, xs, logits, lists, want, meant, len(pool.copies), pool.shape)


def layer_contestant(case: Case, peer: Peer) -> Contestant:
    """Our layer or a peer's, every launch with an output of its own."""
    outs = [torch.empty_like(x) for x in case.xs]
    wants = case.meant if peer.unquantised else case.want

    def launch(i: int) -> Callable[[], object]:
        args = (case.xs[i], case.logits[i], *peer.copies[i % case.copies], outs[i])

        def call() -> None:
            outs[i] = peer.call(*args)  # the result of the last call: in a graph, its memory

        return call

    def check() -> str:
        errors = [reference.relative_error(o, w) for o, w in zip(outs, wants, strict=True)]
        bad = [e for e in errors if not e <= peer.max_error]
        return f"{len(bad)} of {len(errors)} wrong, error {bad[0]:.3g}" if bad else p.OK

    def poison() -> None:
        for out in outs:
            out.fill_(torch.nan)

    return Contestant([launch(i) for i in range(len(outs))], poison, check)


def ourselves(pool: Pool, **options: object) -> Peer:
    """`mono_moe` with further options of its own."""

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        *inputs, out = tensors
        top_k, pad = pool.shape.top_k, pool.scratchpad
        return mono_moe(*inputs, top_k=top_k, out=out, scratchpad=pad, **options)

    unquantised = options.get("activations") == "bf16"
    return Peer(call, pool.copies, p.MAX_ERROR_BF16 if unquantised else p.MAX_ERROR, unquantised)


def floor_contestant(pool: Pool, lists: Sequence[Sequence[int]], copies: int) -> Contestant:
    """The probe on the experts of each launch."""
    seen = (pool.up_samples, pool.down_samples)
    want = torch.stack([expected_sums(*seen, ids, pool.spec.grid) for ids in lists])
    pairs = [pool.copies[i % copies][0::2] for i in range(len(lists))]
    return probe_contestant(pool.spec, pairs, lists, want)


def empty_contestant(grid: int) -> Contestant:
    """A kernel that does nothing: what a launch in a graph costs."""
    function = empty_function(EmptySpec(grid=grid))
    where = torch.empty(1, dtype=torch.int32, device="cuda")
    launches = [lambda: function(where)] * p.LAUNCHES
    return Contestant(launches, lambda: None, lambda: p.NOTHING_TO_CHECK)


def copy_contestant() -> Contestant:
    """One device-to-device copy of COPY_BYTES."""
    source = torch.randint(-128, 127, (COPY_BYTES,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)

    def check() -> str:
        return p.OK if torch.equal(source, target) else "the copy differs"

    return Contestant([lambda: target.copy_(source)], lambda: target.zero_(), check)


def case_rows(case: Case, results: dict[str, Result], cache: str) -> list[p.Row]:
    """Rows of one run; cold ones fail when the L2 cache could have helped."""
    experts = p.mean_experts(case.lists)
    reuse = p.reuse_bytes(case.lists, case.copies, case.shape) if cache != "warm" else 0
    least = p.COLD_FACTOR * tool.facts().l2_bytes
    made = rows(
        results,
        op="moe",
        tokens=case.tokens,
        case=None,
        routing=case.routing,
        cache=cache,
        bytes=round(experts * case.shape.expert_bytes),
        experts=experts,
        reuse_bytes=reuse,
        shape=p.name_of(case.shape),
    )
    if cache != "cold" or reuse > least:
        return made
    text = f"not cold: {reuse / 1e6:.0f} MB between two uses"
    return [replace(row, check=text) if row.check == p.OK else row for row in made]


def token_rows(
    pool: Pool, peers: Mapping[str, Peer], tokens: int, routing: str, replays: int
) -> list[p.Row]:
    """Cold rows of one M and routing; for uniform routing also warm and eager rows."""
    case = make_case(pool, tokens, routing)
    uniform = routing == "uniform"
    layers = {name: peer for name, peer in peers.items() if not peer.baseline}
    runs = {"cold": case, "warm": case.repeated()} if uniform else {"cold": case}
    made = []
    for cache, inputs in runs.items():
        baselines = cache == "cold" and uniform and tokens in BASELINE_TOKENS
        racing = peers if baselines else layers
        contestants = {name: layer_contestant(inputs, peer) for name, peer in racing.items()}
        contestants["floor"] = floor_contestant(pool, inputs.lists, inputs.copies)
        results = take_turns(contestants, replays)
        made += case_rows(inputs, results, cache)
    if uniform:
        able = {name: layer_contestant(case, layers[name]) for name in layers if name in results}
        made += case_rows(case, eager(able, replays), "eager")
    return made


def context_rows(pool: Pool, replays: int) -> Iterator[p.Row]:
    """What the figures are to be read against: empty launches, a copy, one long stream."""
    e = pool.shape.num_experts
    everything = [list(range(e))] * len(pool.copies)
    contestants = {
        "empty": empty_contestant(pool.spec.grid),
        "copy": copy_contestant(),
        "floor": floor_contestant(pool, everything, len(pool.copies)),
    }
    cases = {
        "empty": ("empty kernel", 0, 0),
        "copy": ("device copy, bytes read and written", 2 * COPY_BYTES, 0),
        "floor": ("all experts", e * pool.shape.expert_bytes, e),
    }
    shared = {"op": "moe", "tokens": None, "routing": "none", "cache": "cold", "reuse_bytes": 0}
    for name, result in take_turns(contestants, replays).items():
        case, nbytes, experts = cases[name]
        yield from rows({name: result}, case=case, bytes=nbytes, experts=experts, **shared)


def cases_of(options: Options) -> Iterator[tuple[str, int]]:
    """(routing, tokens): the default shape has more of them than the others."""
    tokens, routings = OTHER_TOKENS, OTHER_ROUTINGS
    if options.quick:
        tokens, routings = QUICK_TOKENS, QUICK_ROUTINGS
    elif options.shape == p.SHAPE:
        tokens, routings = tuple(range(1, MAX_TOKENS + 1)), p.ROUTINGS
    return product(routings, options.tokens or tokens)


def measure(options: Options, advance: Advance) -> list[p.Row]:
    """All rows of the layer in one shape."""
    shape, whole = options.shape, options.shape == p.SHAPE
    cases = list(cases_of(options))
    steps = 3 + len(cases)
    advance("weights", steps)
    pool = make_pool(options.copies, shape)
    advance("peers", steps)
    found = find_peers(options, pool.copies)
    peers = {
        "cute_moe": ourselves(pool),
        "cute_moe_bf16": ourselves(pool, activations="bf16"),
        "cute_moe_programmatic": ourselves(pool, programmatic=True),
        **{name: peer for name, peer in found.items() if whole or not peer.baseline},
    }
    advance("empty kernel, copy, long stream", steps)
    made = list(context_rows(pool, options.replays)) if whole else []
    for routing, tokens in cases:
        advance(f"M={tokens} {routing}", steps)
        made += token_rows(pool, peers, tokens, routing, options.replays)
    return made
