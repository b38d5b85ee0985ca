"""Both entries of the MoE kernel at every kind of shape, on a GPU; few experts each."""

import pytest
import torch
from moe_cases import Shape, Weights, draw_inputs, draw_weights
from moe_errors import unexplained

import cute_moe
from cute_moe import reference
from cute_moe.reference import relative_error

pytestmark = pytest.mark.gpu
WORST, WORST_BF16 = 1.5e-2, 3e-3
FEW_ROWS = 256  # from this N and eight experts a token on, flips of h average out
SHAPES = [
    Shape(32, 2048, 512, 8),
    Shape(32, 2048, 768, 8),
    Shape(32, 2048, 1024, 10),
    Shape(32, 3072, 384, 8),
    Shape(33, 4096, 384, 9),
    Shape(16, 4096, 1408, 8),
    Shape(16, 4096, 704, 8, 64),
    Shape(16, 5120, 1536, 11),
    Shape(16, 7168, 256, 8),
    Shape(12, 7168, 2048, 8),
    Shape(8, 4096, 1792, 2),
    Shape(2, 4096, 14336, 2),
    Shape(32, 4096, 192, 8, 64),
    Shape(32, 2048, 192, 8, 64, 64),
    Shape(32, 4096, 352, 8, 32),
    Shape(32, 2048, 352, 8, 32, 32),
    Shape(16, 640, 512, 3),
    Shape(16, 8192, 128, 16),
    Shape(4, 512, 32, 1, 32),
]
MARGIN = 4096  # bytes
SKIPPED = (-1, "E", 2**31 - 1, -(2**31))
SKIPPED_WIDE = (*SKIPPED, -(2**63), 2**63 - 1, 2**32)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def shape(request) -> Shape:
    return request.param


@pytest.fixture(scope="module")
def weights(shape: Shape) -> Weights:
    return draw_weights(shape, torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def pad(cuda: torch.device, shape: Shape) -> torch.Tensor:
    return make_pad(shape, cuda)


def make_pad(shape: Shape, device: torch.device) -> torch.Tensor:
    e, k, n, top_k = shape[:4]
    return cute_moe.alloc_scratchpad(device, num_experts=e, hidden=k, intermediate=n, top_k=top_k)


def mono(x, logits, tensors, top_k, **options) -> torch.Tensor:
    """One call into a poisoned output."""
    out = torch.full_like(x, float("nan"))
    return cute_moe.mono_moe(x, logits, *tensors, top_k, out=out, **options)


def fused(x, ids, routed, tensors, **options) -> torch.Tensor:
    """The same, with a given routing."""
    up, s_up, down, s_down = tensors
    out = torch.full_like(x, float("nan"))
    return cute_moe.fused_experts(
        x, up, down, routed, ids, w1_scale=s_up, w2_scale=s_down, out=out, **options
    )


def check_rows(got, x, ids, routed, tensors, shape: Shape) -> None:
    """The batch within the bound; where flips of h do not average out, each row, or explained."""
    want = reference.moe_block_fp8_routed(x, ids, routed, *tensors)
    active = (ids >= 0) & (ids < shape.num_experts)
    if shape.top_k >= 8 and shape.intermediate >= FEW_ROWS and active.all():
        assert relative_error(got, want) <= WORST
        return
    for t in range(len(x)):
        if not active[t].any():
            assert not got[t].any(), t
            continue
        error = relative_error(got[t], want[t])
        if error > WORST:
            error = unexplained(got[t], want[t], ids[t][active[t]], *tensors[2:])
        assert error <= WORST, (t, error)


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_values(cuda, shape, weights, pad, tokens) -> None:
    x, logits = draw_inputs(shape, tokens, cuda)
    got = mono(x, logits, weights.quantised, shape.top_k, scratchpad=pad)
    check_rows(got, x, *reference.route(logits, shape.top_k), weights.quantised, shape)
    got = mono(x, logits, weights.quantised, shape.top_k, scratchpad=pad, activations="bf16")
    want = reference.moe_fp32(x, logits, *weights.quantised, shape.top_k)
    assert relative_error(got, want) <= WORST_BF16


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_rows_alone_in_pairs_and_permuted(cuda, shape, weights, pad, activations) -> None:
    options = {"scratchpad": pad, "activations": activations}
    x, logits = draw_inputs(shape, 8, cuda)
    logits[5] = logits[1]  # two tokens of the same experts
    whole = mono(x, logits, weights.quantised, shape.top_k, **options)
    order = torch.randperm(8, device=cuda)
    batches = [torch.tensor([t], device=cuda) for t in range(8)]
    batches += [torch.tensor([t, (3 * t + 1) % 8], device=cuda) for t in range(8)]
    for rows in (*batches, order, order[:5], order[:3]):
        got = mono(x[rows], logits[rows], weights.quantised, shape.top_k, **options)
        assert torch.equal(got, whole[rows]), rows
    fresh = mono(x, logits, weights.quantised, shape.top_k, activations=activations)
    assert torch.equal(fresh, whole), "a fresh scratchpad"


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_the_entries_give_the_same_bits(cuda, shape, weights, pad, activations) -> None:
    for tokens in (1, 3, 8):
        x, logits = draw_inputs(shape, tokens, cuda)
        for scoring, renormalize in (("softmax", True), ("sigmoid", False)):
            chosen = (
                torch.full((tokens, shape.top_k), -7, dtype=torch.int32, device=cuda),
                torch.full((tokens, shape.top_k), float("nan"), device=cuda),
            )
            options = {"scratchpad": pad, "activations": activations}
            names = {"scoring_func": scoring, "renormalize": renormalize}
            tensors = weights.quantised
            want = mono(x, logits, tensors, shape.top_k, **options, **names, routing_out=chosen)
            ids, routed = reference.route(logits, shape.top_k, scoring, renormalize)
            assert torch.equal(chosen[0].long(), ids)
            torch.testing.assert_close(chosen[1], routed, rtol=1e-5, atol=1e-37)
            assert torch.equal(mono(x, logits, tensors, shape.top_k, **options, **names), want)
            for dtype in (torch.int32, torch.int64):
                got = fused(x, chosen[0].to(dtype), chosen[1], tensors, **options)
                assert torch.equal(got, want), (tokens, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_skipped_ids(cuda, shape, weights, pad, dtype) -> None:
    x, logits = draw_inputs(shape, 8, cuda)
    ids, routed = reference.route(logits, shape.top_k)
    ids, routed = ids.to(dtype), routed.contiguous()
    whole = fused(x, ids, routed, weights.quantised, scratchpad=pad)
    for value in SKIPPED if dtype == torch.int32 else SKIPPED_WIDE:
        value = shape.num_experts if value == "E" else value
        there, factors = ids.clone(), routed.clone()
        there[0], there[3] = value, value
        there[5, 0] = there[6, -1] = value
        factors[3], factors[5, 0] = float("nan"), float("inf")
        got = fused(x, there, factors, weights.quantised, scratchpad=pad)
        assert not got[[0, 3]].any() and torch.equal(got[[1, 2, 4, 7]], whole[[1, 2, 4, 7]])
        check_rows(got, x, there, factors, weights.quantised, shape)
        there[:] = value
        assert not fused(x, there, factors, weights.quantised, scratchpad=pad).any()
        assert not fused(x[:1], there[:1], factors[:1], weights.quantised, scratchpad=pad).any()


def test_hostile_routings(cuda, shape, weights, pad) -> None:
    """All pairs on one expert, all apart as far as there are experts, and any repetition."""
    experts, top_k = shape.num_experts, shape.top_k
    x, _ = draw_inputs(shape, 8, cuda)
    routed = torch.rand(8, top_k, device=cuda) / top_k
    cases = {
        "one": torch.full((8, top_k), experts - 1, device=cuda),
        "apart": torch.arange(8 * top_k, device=cuda).view(8, top_k) % experts,
        "repeated": torch.randint(0, max(experts // 4, 1), (8, top_k), device=cuda),
        "last": torch.arange(8 * top_k, device=cuda).view(8, top_k).flip(1) % (experts + 1),
    }
    for name, ids in cases.items():
        for tokens in (8, 1, 4):
            got = fused(x[:tokens], ids[:tokens], routed[:tokens], weights.quantised,
                        scratchpad=pad)  # fmt: skip
            exact = reference.moe_fp32_routed(
                x[:tokens], ids[:tokens], routed[:tokens], *weights.quantised
            )
            assert relative_error(got, exact) <= 0.1, name
            if tokens == 8:
                whole = got
            assert torch.equal(got, whole[:tokens]), (name, tokens)
        wide = fused(x, ids, routed, weights.quantised, scratchpad=pad, activations="bf16")
        exact = reference.moe_fp32_routed(x, ids, routed, *weights.quantised)
        assert relative_error(wide, exact) <= WORST_BF16, name


def test_expert_map_scale_and_weights_in_bf16(cuda, shape, weights, pad) -> None:
    experts, top_k = shape.num_experts, shape.top_k
    table = torch.full((3 * experts + 1,), -1, dtype=torch.int32, device=cuda)
    places = torch.randperm(len(table), device=cuda)
    table[places[:experts]] = torch.arange(experts, dtype=torch.int32, device=cuda)
    table[places[experts]] = experts  # no expert here either
    x, _ = draw_inputs(shape, 8, cuda)
    ids = torch.randint(-2, len(table) + 2, (8, top_k), device=cuda)
    routed = torch.rand(8, top_k, device=cuda)
    local = reference.local_ids(ids, experts, table)
    for dtype in (torch.int32, torch.int64):
        got = fused(x, ids.to(dtype), routed, weights.quantised, expert_map=table, scratchpad=pad)
        assert torch.equal(got, fused(x, local, routed, weights.quantised, scratchpad=pad))
        check_rows(got, x, local, routed, weights.quantised, shape)
    doubled = fused(x, local, routed, weights.quantised, output_scale=2.0, scratchpad=pad)
    assert torch.equal(doubled, 2 * got)
    rounded = routed.bfloat16()
    got = fused(x, local, rounded, weights.quantised, scratchpad=pad)
    assert torch.equal(got, fused(x, local, rounded.float(), weights.quantised, scratchpad=pad))


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float8_e8m0fnu), (torch.float8_e8m0fnu, torch.bfloat16)]
)
def test_dtypes_of_scales(cuda, shape, weights, pad, dtypes) -> None:
    up, s_up, down, s_down = weights.quantised
    s_up, s_down = s_up.to(dtypes[0]), s_down.to(dtypes[1])
    x, logits = draw_inputs(shape, 3, cuda)
    got = mono(x, logits, (up, s_up, down, s_down), shape.top_k, scratchpad=pad)
    exact = (up, s_up.float(), down, s_down.float())
    assert torch.equal(got, mono(x, logits, exact, shape.top_k, scratchpad=pad))
    ids, routed = reference.route(logits, shape.top_k)
    got = fused(x, ids.contiguous(), routed, (up, s_up, down, s_down), scratchpad=pad)
    assert torch.equal(got, fused(x, ids.contiguous(), routed, exact, scratchpad=pad))


def surrounded(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes, a copy in their middle): around it lie 2 x MARGIN bytes of what any dtype sees as NaN
    or -1."""
    nbytes = tensor.nbytes
    memory = torch.full((nbytes + 2 * MARGIN,), 0xFF, dtype=torch.uint8, device=tensor.device)
    inside = memory[MARGIN : MARGIN + nbytes].view(tensor.dtype).view(tensor.shape)
    inside.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
    return memory, inside


def in_poison(tensor: torch.Tensor) -> torch.Tensor:
    return surrounded(tensor)[1]


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_nothing_beyond_the_tensors_counts(cuda, shape, weights, activations) -> None:
    x, logits = draw_inputs(shape, 5, cuda)
    ids, routed = reference.route(logits, shape.top_k)
    ids, options = ids.int(), {"activations": activations}
    want = mono(x, logits, weights.quantised, shape.top_k, **options)
    given = fused(x, ids, routed, weights.quantised, **options)
    tensors = tuple(in_poison(tensor) for tensor in weights.quantised)
    got = mono(in_poison(x), in_poison(logits), tensors, shape.top_k, **options)
    assert torch.equal(got, want)
    got = fused(in_poison(x), in_poison(ids), in_poison(routed), tensors, **options)
    assert torch.equal(got, given)


def test_nothing_beyond_the_outputs_is_written(cuda, shape, weights) -> None:
    size, (x, logits) = cute_moe.get_scratchpad_size_bytes, draw_inputs(shape, 5, cuda)
    e, k, n, top_k = shape[:4]
    nbytes = size(num_experts=e, hidden=k, intermediate=n, top_k=top_k)
    results = [
        torch.zeros_like(x),
        torch.zeros(nbytes, dtype=torch.uint8, device=cuda),
        torch.zeros(5, top_k, dtype=torch.int32, device=cuda),
        torch.zeros(5, top_k, device=cuda),
    ]
    memories, (out, pad, *chosen) = zip(*map(surrounded, results), strict=True)
    cute_moe.mono_moe(
        x, logits, *weights.quantised, top_k, out=out, scratchpad=pad, routing_out=tuple(chosen)
    )
    for memory in memories:
        assert (memory[:MARGIN] == 0xFF).all() and (memory[-MARGIN:] == 0xFF).all()
    assert torch.equal(out, mono(x, logits, weights.quantised, top_k))


def test_entries_in_turn_on_one_scratchpad(cuda, shape, weights, pad) -> None:
    for i in range(24):
        x, logits = draw_inputs(shape, 1 + (5 * i) % 8, cuda)
        options = {"activations": ("fp8", "bf16")[i // 2 % 2], "programmatic": i % 3 == 0}
        if i % 2:
            ids, routed = reference.route(logits, shape.top_k)
            ids[i % len(x)] = -1
            inputs, call = (x, ids.contiguous(), routed, weights.quantised), fused
        else:
            inputs, call = (x, logits, weights.quantised, shape.top_k), mono
        assert torch.equal(call(*inputs, **options, scratchpad=pad), call(*inputs, **options)), i


def test_graphs(cuda, shape, weights, pad) -> None:
    x, logits = draw_inputs(shape, 8, cuda)
    ids, routed = reference.route(logits, shape.top_k)
    ids, outs = ids.contiguous(), [torch.empty_like(x) for _ in range(2)]
    up, s_up, down, s_down = weights.quantised

    def step() -> None:
        cute_moe.mono_moe(x, logits, *weights.quantised, shape.top_k, out=outs[0], scratchpad=pad)
        cute_moe.fused_experts(
            x, up, down, routed, ids, w1_scale=s_up, w2_scale=s_down, out=outs[1], scratchpad=pad
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        new = draw_inputs(shape, 8, cuda)
        x.copy_(new[0])
        logits.copy_(new[1])
        ids[3] = -1
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(outs[0], mono(x, logits, weights.quantised, shape.top_k))
        assert torch.equal(outs[1], fused(x, ids, routed, weights.quantised))
