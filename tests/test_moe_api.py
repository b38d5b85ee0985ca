"""The MoE layer's public functions on the CPU: the contract, errors and the reference path."""

import inspect

import pytest
import torch
from moe_cases import E, K, N

import cute_moe


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
        "out", "scratchpad", "interleave_up",
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
        ("top_k", 9),
        ("scoring_func", "tanh"),
        ("scratchpad", torch.zeros(16, dtype=torch.uint8)),
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


def test_out_must_not_overlap(arguments) -> None:
    with pytest.raises(ValueError, match="out"):
        cute_moe.mono_moe(**arguments, out=arguments["activations_in"])


def test_interleave() -> None:
    w = torch.arange(2 * 32 * 4).view(2, 32, 4).to(torch.uint8).view(torch.float8_e4m3fn)
    got = cute_moe.interleave_for_tma_wgmma_up(w)
    order = [r + half * 16 + group * 8 for group in range(2) for half in range(2) for r in range(8)]
    assert torch.equal(got.view(torch.uint8), w.view(torch.uint8)[:, order])
    with pytest.raises(ValueError, match="w"):
        cute_moe.interleave_for_tma_wgmma_up(w[:, :15])


def test_scratchpad_size() -> None:
    pad = cute_moe.alloc_scratchpad("cpu")
    assert pad.numel() == cute_moe.get_scratchpad_size_bytes()
    assert not pad.any()
    assert isinstance(cute_moe.has_monomoe(), bool)
