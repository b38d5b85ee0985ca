"""`fused_experts` on the CPU: skipped ids, repeated ids, expert maps, scales, errors, bits."""

import inspect

import numpy as np
import pytest
import torch
from moe_cases import Shape, draw_inputs, draw_weights

import cute_moe
from cute_moe import moe, reference

SHAPE = Shape(6, 512, 192, 3, 64)
E, K, N, TOP_K = SHAPE[:4]
FAR = (-1, E, 2**31 - 1, -(2**31))
FARTHER = (*FAR, -(2**63), 2**63 - 1, 2**32, 2**32 + 1)  # the last two: 0 and 1 in 32 bits


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    up, s_up, down, s_down = draw_weights(SHAPE).quantised
    return dict(w1=up, w2=down, w1_scale=s_up, w2_scale=s_down)


def routed(tokens: int, dtype: torch.dtype = torch.int32):
    """(x, weights, ids) of distinct experts."""
    x, logits = draw_inputs(SHAPE, tokens)
    ids, weights = reference.route(logits, TOP_K)
    return x, weights, ids.to(dtype).contiguous()


def run(x, weights, ids, layer, **options) -> torch.Tensor:
    """One call into a poisoned output."""
    out = torch.full_like(x, torch.nan)
    got = cute_moe.fused_experts(x, topk_weights=weights, topk_ids=ids, **layer, out=out, **options)
    assert got is out
    return got


def by_hand(x, weights, ids, layer, scale=1.0, activations="fp8") -> torch.Tensor:
    """Slot by slot: each id that is an expert alone, its output times its weight."""
    compute = reference.moe_block_fp8_routed if activations == "fp8" else reference.moe_fp32_routed
    tensors = [layer[name] for name in ("w1", "w1_scale", "w2", "w2_scale")]
    up, s_up, down, s_down = tensors
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if 0 <= expert < len(up):
                one, alone = torch.ones(1, 1), torch.tensor([[expert]])
                row = compute(x[token : token + 1], alone, one, up, s_up, down, s_down)
                total[token] += weight * row[0].double()
    return total * scale


def test_signature() -> None:
    parameters = inspect.signature(cute_moe.fused_experts).parameters
    assert list(parameters) == [
        "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "w1_scale", "w2_scale",
        "expert_map", "output_scale", "activations", "programmatic", "out", "scratchpad",
    ]  # fmt: skip
    defaults = {name: p.default for name, p in parameters.items() if p.kind == p.KEYWORD_ONLY}
    assert list(defaults)[2:] == list(parameters)[7:]
    assert list(defaults.values())[2:] == [None, 1.0, "fp8", False, None, None]


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_given_routing_gives_the_bits_of_mono_moe(weights, activations, dtype) -> None:
    tensors = [weights[name] for name in ("w1", "w1_scale", "w2", "w2_scale")]
    x, logits = draw_inputs(SHAPE, 5)
    for options in (("softmax", True), ("sigmoid", False)):
        chosen = torch.empty(5, TOP_K, dtype=torch.int32), torch.empty(5, TOP_K)
        want = cute_moe.mono_moe(
            x, logits, *tensors, TOP_K, *options, activations=activations, routing_out=chosen
        )
        ids = chosen[0].to(dtype)
        assert torch.equal(run(x, chosen[1], ids, weights, activations=activations), want)
        for t in range(5):
            row = slice(t, t + 1)
            got = run(x[row], chosen[1][row], ids[row].clone(), weights, activations=activations)
            assert torch.equal(got, want[row])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_skipped_ids(weights, dtype) -> None:
    """Whatever the weight of one that is skipped, it adds nothing; a row of them is zero."""
    x, routing, ids = routed(4, dtype)
    for far in FAR if dtype == torch.int32 else FARTHER:
        there, factors = ids.clone(), routing.clone()
        there[0, 1] = there[2, 2] = far
        there[1] = far
        factors[0, 1], factors[2, 2], factors[1, 0] = torch.nan, torch.inf, torch.nan
        got = run(x, factors, there, weights)
        assert not got[1].any() and got.isfinite().all()
        assert torch.equal(got[3], run(x, routing, ids, weights)[3])
        dropped = factors.nan_to_num(0.0, 0.0)
        want = by_hand(x, dropped, there, weights)
        assert reference.relative_error(got, want) < 5e-3
    nothing = torch.full_like(ids, -1)
    assert not run(x, routing, nothing, weights).any()


def test_repeated_ids_add_up(weights) -> None:
    x, routing, ids = routed(3)
    ids[0] = ids[0, 0]
    ids[1, 2] = ids[1, 0]
    got = run(x, routing, ids, weights)
    assert reference.relative_error(got, by_hand(x, routing, ids, weights)) < 5e-3


def test_more_slots_than_experts(weights) -> None:
    x, _, _ = routed(2)
    ids = torch.arange(2 * 16, dtype=torch.int32).view(2, 16) % (E + 2)
    routing = torch.rand(2, 16)
    got = run(x, routing, ids, weights)
    assert reference.relative_error(got, by_hand(x, routing, ids, weights)) < 5e-3


def test_expert_map(weights) -> None:
    """One rank of several: the ids are global, most experts are elsewhere."""
    table = torch.full((20,), -1, dtype=torch.int32)
    table[[3, 5, 8, 11, 19]] = torch.tensor([4, 0, 2, 5, 1], dtype=torch.int32)
    table[7], table[9] = E, 2**31 - 1  # no experts either
    x, routing, _ = routed(4)
    ids = torch.tensor([[3, 5, 8], [19, 7, 9], [0, 1, 2], [20, -1, 11]])
    local = torch.tensor([[4, 0, 2], [1, -1, -1], [-1, -1, -1], [-1, -1, 5]])
    for dtype in (torch.int32, torch.int64):
        got = run(x, routing, ids.to(dtype), weights, expert_map=table)
        assert torch.equal(got, run(x, routing, local, weights))
        assert got[[0, 1, 3]].any(dim=1).all() and not got[2].any()
    far = torch.tensor([[3, 2**63 - 1, -(2**63)]])
    near = torch.tensor([[4, -1, -1]])
    got = run(x[:1], routing[:1], far, weights, expert_map=table)
    assert torch.equal(got, run(x[:1], routing[:1], near, weights))


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_output_scale_multiplies_before_the_rounding(weights, activations) -> None:
    x, routing, ids = routed(3)
    tensors = [weights[name] for name in ("w1", "w1_scale", "w2", "w2_scale")]
    for scale in (2.5, 0, -1, 1.0):
        got = run(x, routing, ids, weights, output_scale=scale, activations=activations)
        want = by_hand(x, routing, ids, weights, scale, activations)
        assert reference.relative_error(got, want) < 5e-3
    exact = reference.moe_fp32_routed(x, ids, routing, *tensors)
    scaled = run(x, routing, ids, weights, output_scale=2.5, activations="bf16")
    assert torch.equal(scaled, (exact * 2.5).bfloat16())
    assert not torch.equal(scaled, (exact.bfloat16().float() * 2.5).bfloat16())


def test_weights_in_bf16_are_used_as_they_are(weights) -> None:
    x, routing, ids = routed(3)
    rounded = routing.bfloat16()
    got = run(x, rounded, ids, weights)
    assert torch.equal(got, run(x, rounded.float(), ids, weights))
    assert not torch.equal(got, run(x, routing, ids, weights))


def test_no_tokens_and_meta_tensors(weights) -> None:
    x, routing, ids = routed(0)
    assert run(x, routing, ids, weights).shape == (0, K)
    x, routing, ids = (tensor.to("meta") for tensor in routed(2))
    there = {name: tensor.to("meta") for name, tensor in weights.items()}
    got = cute_moe.fused_experts(x, topk_weights=routing, topk_ids=ids, **there)
    assert got.is_meta and got.shape == (2, K) and got.dtype == torch.bfloat16


BAD = [
    ("hidden_states", torch.zeros(9, K).bfloat16(), ValueError),
    ("hidden_states", torch.zeros(2, K), ValueError),
    ("hidden_states", np.zeros((2, K)), TypeError),
    ("topk_ids", torch.zeros(2, TOP_K), ValueError),
    ("topk_ids", torch.zeros(2, TOP_K, dtype=torch.int16), ValueError),
    ("topk_ids", torch.zeros(3, TOP_K, dtype=torch.int32), ValueError),
    ("topk_ids", torch.zeros(2 * TOP_K, dtype=torch.int32), ValueError),
    ("topk_weights", torch.zeros(2, TOP_K).half(), ValueError),
    ("topk_weights", torch.zeros(2, TOP_K + 1), ValueError),
    ("topk_weights", torch.zeros(TOP_K, 2).T, ValueError),
    ("w1", torch.zeros(E, 2 * N + 64, K).to(reference.E4M3), ValueError),
    ("w2", torch.zeros(E + 1, K, N).to(reference.E4M3), ValueError),
    ("w1_scale", torch.ones(E, 6, 3), ValueError),
    ("w2_scale", torch.ones(E, 4, 4), ValueError),
    ("w2_scale", torch.ones(E, 4, 3).half(), ValueError),
    ("expert_map", torch.zeros(E), ValueError),
    ("expert_map", torch.zeros(0, dtype=torch.int32), ValueError),
    ("expert_map", torch.zeros(2, E, dtype=torch.int32), ValueError),
    ("expert_map", [0] * E, TypeError),
    ("output_scale", "1", TypeError),
    ("output_scale", True, TypeError),
    ("output_scale", None, TypeError),
    ("activations", "fp16", ValueError),
    ("programmatic", 1, TypeError),
    ("scratchpad", torch.zeros(16, dtype=torch.uint8), ValueError),
    ("scratchpad", 7, TypeError),
    ("out", torch.zeros(3, K).bfloat16(), ValueError),
    ("out", [1.0], TypeError),
]


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name, value, kind", BAD)
def test_bad_arguments_are_refused_alike(weights, monkeypatch, name, value, kind, later) -> None:
    if later:  # what a compiled kernel refuses in other words
        monkeypatch.setattr(moe._KERNELS, "lookup", lambda key: refuse)
    x, routing, ids = routed(2)
    out = torch.full_like(x, 7.0)
    good = dict(hidden_states=x, topk_weights=routing, topk_ids=ids, out=out, **weights)
    with pytest.raises(kind, match=f"^{name}: expected"):
        cute_moe.fused_experts(**{**good, name: value})
    assert (out == 7.0).all()


def refuse(*arguments: object) -> None:
    raise ValueError("argument #3: other words")


@pytest.mark.parametrize("name", ["hidden_states", "topk_ids", "topk_weights", "expert_map", "w2"])
def test_out_must_not_overlap(weights, name) -> None:
    x, routing, ids = routed(2)
    good = dict(hidden_states=x, topk_weights=routing, topk_ids=ids, **weights)
    memory = torch.zeros(3 * K * N, dtype=torch.bfloat16)
    out = memory[: K * 2].view(2, K)
    views = dict(
        hidden_states=memory[K : 3 * K].view(2, K),
        topk_ids=memory[:12].view(torch.int32).view(2, 3),
        topk_weights=memory[2 * K - 4 : 2 * K + 2].view(2, 3),
        expert_map=memory[:16].view(torch.int32),
        w2=memory.view(torch.float8_e4m3fn).view(E, K, N),
    )
    with pytest.raises(ValueError, match=f"^out: .* overlap with {name}$"):
        cute_moe.fused_experts(**{**good, name: views[name]}, out=out)


def test_later_calls_launch(weights, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(moe._KERNELS, "lookup", lambda key: lambda *a: calls.append(a))
    x, routing, ids = routed(2)
    table = torch.zeros(9, dtype=torch.int32)
    pad = cute_moe.alloc_scratchpad("cpu", intermediate=N, top_k=TOP_K)
    out = torch.empty_like(x)
    options = dict(expert_map=table, output_scale=0.5, scratchpad=pad)
    tensors = [weights[name] for name in ("w1", "w1_scale", "w2", "w2_scale")]
    order = [x, ids, routing, *tensors, out, pad, table, 0.5]
    cute_moe.fused_experts(x, topk_weights=routing, topk_ids=ids, out=out, **weights, **options)
    assert all(a is b for a, b in zip(calls[0], order, strict=True))
    got = cute_moe.fused_experts(x, topk_weights=routing, topk_ids=ids, **weights)
    assert calls[1][7] is got and calls[1][8].shape == pad.shape and calls[1][9:] == (None, 1.0)


def test_e8m0_scales_reach_the_kernel_as_bytes() -> None:
    seen = []
    spec = type("S", (), {"scales_up_dtype": "float32", "scales_down_dtype": "float8_e8m0fnu"})
    function = moe._pass_exponents(spec, lambda *a: seen.append(a))
    scale = torch.tensor([0.25, 4.0]).to(torch.float8_e8m0fnu)
    other = torch.ones(2)
    function(other, scale, None, 1.0)
    assert seen[0][0] is other and seen[0][2:] == (None, 1.0)
    assert seen[0][1].dtype == torch.uint8 and seen[0][1].tolist() == [125, 129]
    assert seen[0][1].data_ptr() == scale.data_ptr()
    spec.scales_down_dtype = "bfloat16"
    assert moe._pass_exponents(spec, refuse) is refuse
