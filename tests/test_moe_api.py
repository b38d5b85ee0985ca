"""The MoE layer's public functions on the CPU: the contract, errors and the reference path."""

import inspect

import numpy as np
import pytest
import torch
from moe_cases import E, K, N

import cute_moe
from cute_moe import moe


@pytest.fixture(scope="module")
def arguments() -> dict:
    fp8 = torch.float8_e4m3fn
    return dict(
        activations_in=torch.randn(2, K).to(torch.bfloat16),
        router_logits=torch.randn(2, E),
        expert_weights_up=torch.zeros(E, 2 * N, K, dtype=fp8),
        expert_scales_up=torch.ones(E, 2 * N // 128, K // 128),
        expert_weights_down=torch.zeros(E, K, N, dtype=fp8),
        expert_scales_down=torch.ones(E, K // 128, N // 128),
        top_k=8,
    )


def test_signature() -> None:
    names = list(inspect.signature(cute_moe.mono_moe).parameters)
    assert names == [
        "activations_in", "router_logits", "expert_weights_up", "expert_scales_up",
        "expert_weights_down", "expert_scales_down", "top_k", "scoring_func", "renormalize",
        "out", "scratchpad", "interleave_up", "activations", "programmatic", "routing_out",
    ]  # fmt: skip


def test_cpu_tensors_take_the_reference(arguments) -> None:
    out = torch.full((2, K), float("nan"), dtype=torch.bfloat16)
    assert cute_moe.mono_moe(**arguments, out=out) is out
    assert not out.any()


def test_no_tokens(arguments) -> None:
    empty = dict(
        activations_in=torch.empty(0, K, dtype=torch.bfloat16), router_logits=torch.empty(0, E)
    )
    assert cute_moe.mono_moe(**{**arguments, **empty}).shape == (0, K)


@pytest.mark.parametrize(
    "name, value",
    [
        ("activations_in", torch.zeros(9, K, dtype=torch.bfloat16)),
        ("activations_in", torch.zeros(2, K)),
        ("router_logits", torch.zeros(2, E - 1)),
        ("router_logits", torch.zeros(3, E)),
        ("expert_scales_up", torch.ones(E, 8, 15)),
        ("top_k", 0),
        ("top_k", 17),
        ("scoring_func", "tanh"),
        ("scratchpad", torch.zeros(16, dtype=torch.uint8)),
        ("scratchpad", cute_moe.alloc_scratchpad("cpu", top_k=7)),
        ("out", torch.zeros(3, K, dtype=torch.bfloat16)),
    ],
)
def test_bad_values(arguments, name, value) -> None:
    out = torch.full((2, K), 7.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=name):
        cute_moe.mono_moe(**{**arguments, "out": out, name: value})
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    "name, value", [("top_k", 8.0), ("top_k", True), ("renormalize", 1), ("activations_in", None)]
)
def test_bad_types(arguments, name, value) -> None:
    with pytest.raises(TypeError, match=name):
        cute_moe.mono_moe(**{**arguments, name: value})


@pytest.mark.parametrize(
    "start, name",
    [
        (2 * K, None), (2 * K + 8, "activations_in"), (4 * K, "activations_in"),
        (6 * K - 8, "activations_in"), (6 * K, None), (6 * K + 8, "router_logits"),
        (8 * K, "router_logits"), (8 * K + 4 * E - 8, "router_logits"), (8 * K + 4 * E, None),
    ],
)  # fmt: skip
def test_out_must_not_overlap(arguments, start, name) -> None:
    memory = torch.zeros(12 * K, dtype=torch.bfloat16)
    own = dict(
        activations_in=memory[4 * K : 6 * K].view(2, K),
        router_logits=memory[8 * K : 8 * K + 4 * E].view(torch.float32).view(2, E),
        out=memory[start : start + 2 * K].view(2, K),
    )
    if name is None:
        assert cute_moe.mono_moe(**{**arguments, **own}) is own["out"]
    else:
        with pytest.raises(ValueError, match=f"^out: .* overlap with {name}$"):
            cute_moe.mono_moe(**{**arguments, **own})


def launched(monkeypatch, kernel) -> None:
    """Makes the function believe that `kernel` is compiled and has run for these dtypes."""
    monkeypatch.setattr(moe._KERNELS, "lookup", lambda key: kernel)


@pytest.mark.parametrize(
    "name, value, kind",
    [
        ("router_logits", torch.zeros(3, E), ValueError),
        ("expert_scales_down", None, TypeError),
        ("activations_in", torch.zeros(9, K, dtype=torch.bfloat16), ValueError),
        ("activations_in", torch.tensor(0.0), ValueError),
        ("out", [1.0], TypeError),
        ("scratchpad", torch.zeros(16, dtype=torch.uint8), ValueError),
        ("scratchpad", 7, TypeError),
        ("top_k", True, TypeError),
        ("top_k", 1.0, TypeError),
        ("renormalize", 1, TypeError),
        ("interleave_up", 1, TypeError),
        ("activations", "fp16", ValueError),
        ("activations", None, ValueError),
        ("programmatic", 1, TypeError),
        ("scoring_func", ["softmax"], ValueError),
    ],
)
def test_later_calls_are_refused_in_the_same_words(
    arguments, monkeypatch, name, value, kind
) -> None:
    def refuse(*tensors: object) -> None:
        raise ValueError("argument #3: other words")

    launched(monkeypatch, refuse)
    with pytest.raises(kind, match=f"^{name}: expected"):
        cute_moe.mono_moe(**{**arguments, name: value})


def test_later_calls_launch_or_fail_as_the_kernel_does(arguments, monkeypatch) -> None:
    calls = []
    launched(monkeypatch, lambda *tensors: calls.append(tensors))
    out = torch.empty(2, K, dtype=torch.bfloat16)
    assert cute_moe.mono_moe(**arguments, out=out) is out
    assert len(calls) == 1 and calls[0][6] is out and len(calls[0]) == 10
    assert calls[0][7].numel() == cute_moe.get_scratchpad_size_bytes()
    assert calls[0][8:] == (None, None)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    start = -memory.data_ptr() % 128
    pad = memory[start : start + cute_moe.get_scratchpad_size_bytes()]
    chosen = (torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 8))
    cute_moe.mono_moe(**arguments, scratchpad=pad, routing_out=chosen)
    assert calls[1][7] is pad and calls[1][8] is chosen[0] and calls[1][9] is chosen[1]
    shifted = memory[start + 16 : start + 16 + cute_moe.get_scratchpad_size_bytes()]
    with pytest.raises(ValueError, match="scratchpad: expected .* 128-byte aligned"):
        cute_moe.mono_moe(**arguments, scratchpad=shifted)
    with pytest.raises(ValueError, match=r"^routing_out\[0\]: .* overlap with activations_in$"):
        ids = arguments["activations_in"].view(torch.int32).flatten()[:16].view(2, 8)
        cute_moe.mono_moe(**arguments, routing_out=(ids, chosen[1]))

    def fail(*tensors: object) -> None:
        raise RuntimeError("no launch")

    launched(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="^no launch$"):
        cute_moe.mono_moe(**arguments)
    assert len(calls) == 2


def test_no_gradient(arguments) -> None:
    x = arguments["activations_in"].clone().requires_grad_()
    assert not cute_moe.mono_moe(**{**arguments, "activations_in": x}).requires_grad


@pytest.fixture(scope="module")
def random_weights() -> tuple[torch.Tensor, ...]:
    """e4m3 weights of random bits, as (up, its scales, down, its scales)."""

    def draw(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        bits = torch.randint(0, 120, (E, rows, columns), dtype=torch.uint8)
        return bits.view(torch.float8_e4m3fn), torch.full((E, rows // 128, columns // 128), 1e-4)

    return *draw(2 * N, K), *draw(K, N)


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_cpu_gives_the_same_bits_in_every_batch_and_mode(random_weights, activations) -> None:
    x, logits = torch.randn(3, K).bfloat16(), torch.randn(3, E)
    logits[2] = logits[0]

    def run(rows: slice) -> torch.Tensor:
        return cute_moe.mono_moe(x[rows], logits[rows], *random_weights, 4, activations=activations)

    whole = run(slice(None))
    assert torch.equal(torch.cat([run(slice(row, row + 1)) for row in range(3)]), whole)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert torch.equal(run(slice(None)), whole)


def test_scratchpads_of_the_cpu_are_aligned(arguments) -> None:
    pads = [cute_moe.alloc_scratchpad("cpu") for _ in range(8)]
    for pad in pads:
        assert pad.numel() == cute_moe.get_scratchpad_size_bytes()
        cute_moe.mono_moe(**arguments, scratchpad=pad)


def test_misaligned_logits_say_what_to_do(arguments) -> None:
    fused = torch.randn(1, E + 1).bfloat16()
    one = {**arguments, "activations_in": arguments["activations_in"][:1]}
    logits = fused[:, 1:]
    assert logits.is_contiguous()
    text = (
        r"^router_logits: .*16-byte aligned.* address 2 bytes past .*; its \.clone\(\) is aligned$"
    )
    with pytest.raises(ValueError, match=text):
        cute_moe.mono_moe(**{**one, "router_logits": logits})
    cute_moe.mono_moe(**{**one, "router_logits": logits.clone()})


def test_meta_tensors_give_the_shape(arguments) -> None:
    tensors = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    out = torch.empty(2, K, dtype=torch.bfloat16, device="meta")
    assert cute_moe.mono_moe(**tensors, out=out) is out
    got = cute_moe.mono_moe(**tensors)
    assert got.shape == (2, K) and got.is_meta and got.dtype == torch.bfloat16


def test_inference_tensors(arguments) -> None:
    with torch.inference_mode():
        out = torch.full((2, K), torch.nan, dtype=torch.bfloat16)
        x = arguments["activations_in"].clone()
    assert not cute_moe.mono_moe(**{**arguments, "activations_in": x}, out=out).any()
    assert not cute_moe.mono_moe(**{**arguments, "activations_in": x}).is_inference()


def test_out_must_not_be_a_weight(arguments) -> None:
    weights = arguments["expert_weights_down"]
    out = weights.view(torch.bfloat16).flatten()[-2 * K :].view(2, K)
    with pytest.raises(ValueError, match="^out: .* overlap with expert_weights_down$"):
        cute_moe.mono_moe(**arguments, out=out)
    assert not weights.view(torch.uint8).any()


@pytest.mark.parametrize(
    "name, value, came",
    [
        ("top_k", np.int64(8), "numpy.int64"),
        ("renormalize", np.bool_(True), r"numpy.bool_?"),
        ("router_logits", np.zeros((2, E)), "numpy.ndarray"),
        ("programmatic", 0, "int"),
        ("interleave_up", None, "NoneType"),
    ],
)
def test_types_are_named_with_their_module(arguments, name, value, came) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected .*, got {came}$"):
        cute_moe.mono_moe(**{**arguments, name: value})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_interleave_takes_any_dtype_and_strides(dtype) -> None:
    w = torch.randn(2, 32, 8).to(dtype)
    order = [r + half * 16 + group * 8 for group in range(2) for half in range(2) for r in range(8)]
    want = w.view(torch.uint8)[:, order].view(dtype)
    strided = torch.stack([w, w], dim=2).flatten(1, 2)[:, ::2]
    turned = w.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = want.float()
    for given in (w, strided, turned):
        got = cute_moe.interleave_for_tma_wgmma_up(given)
        assert got.dtype == dtype and got.is_contiguous() and torch.equal(got.float(), wanted)
    if dtype.is_floating_point and dtype.itemsize > 1:
        grown = w.clone().requires_grad_()
        got = cute_moe.interleave_for_tma_wgmma_up(grown)
        assert torch.equal(got, want) and not got.requires_grad
    assert cute_moe.interleave_for_tma_wgmma_up(w[:0]).shape == (0, 32, 8)


def test_interleave() -> None:
    w = torch.arange(2 * 32 * 4).view(2, 32, 4).to(torch.uint8).view(torch.float8_e4m3fn)
    got = cute_moe.interleave_for_tma_wgmma_up(w)
    order = [r + half * 16 + group * 8 for group in range(2) for half in range(2) for r in range(8)]
    assert torch.equal(got.view(torch.uint8), w.view(torch.uint8)[:, order])
    with pytest.raises(ValueError, match="w"):
        cute_moe.interleave_for_tma_wgmma_up(w[:, :15])
