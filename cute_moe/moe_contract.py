"""What the tensors of a MoE call must be, and the shape that they say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from cute_moe.host.check import Contract, TensorRule, check_apart, check_tensor, dtype_name
from cute_moe.host.scratch import Region, ScratchLayout
from cute_moe.kernels.moe.spec import MAX_TOKENS, check_shape, scratch_regions_of
from cute_moe.reference import scale_blocks

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
MONO = (
    "activations_in", "router_logits", "expert_weights_up", "expert_scales_up",
    "expert_weights_down", "expert_scales_down",
)  # fmt: skip
FUSED = ("hidden_states", "topk_ids", "topk_weights", "w1", "w1_scale", "w2", "w2_scale")
ROUTING_OUT = ("routing_out[0]", "routing_out[1]")


class Shape(NamedTuple):
    """The sizes of a call, by the names of `MoeSpec`, and its number of tokens."""

    tokens: int
    num_experts: int
    hidden: int
    intermediate: int
    scale_block: int
    scale_block_hidden: int

    def of_spec(self) -> dict[str, int]:
        """The fields of a `MoeSpec`."""
        return {name: size for name, size in self._asdict().items() if name != "tokens"}


@cache
def scratch_layout(intermediate: int, top_k: int) -> ScratchLayout:
    """The scratchpad's layout, for a shape that has been checked."""
    regions = scratch_regions_of(intermediate, top_k)
    return ScratchLayout([Region(name, size, zeroed=True) for name, size in regions])


def check_mono(
    inputs: Sequence[torch.Tensor],
    top_k: int,
    out: torch.Tensor | None,
    scratchpad: torch.Tensor | None,
    routing_out: tuple[torch.Tensor, torch.Tensor] | None,
) -> Shape:
    """The shape of a call of `mono_moe`, whose inputs go by the names MONO.

    Raises TypeError or ValueError, naming what is wrong; `top_k` is a checked option.
    """
    for name, tensor in zip(MONO, inputs, strict=True):
        check_tensor(name, tensor)
    if routing_out is not None:
        check_pair(routing_out)
    experts = inputs[1].shape[-1] if inputs[1].dim() else 0
    outs = [out] if out is not None else []
    chosen = None if routing_out is None else top_k
    contract = _mono_contract(16 if experts % 8 == 0 else 4, bool(outs), chosen)
    tensors = [*inputs, *outs, *(routing_out or ())]
    sizes = contract.check(tensors)
    shape = _shape(sizes, top_k, MONO[2:], inputs[2:])
    if top_k > shape.num_experts:
        raise ValueError(f"top_k: expected 1..{shape.num_experts}, got {top_k}")
    check_outputs([rule.name for rule in contract.rules], tensors, len(inputs))
    _check_scratchpad(scratchpad, shape, top_k, inputs[0].device)
    return shape


def check_fused(
    inputs: Sequence[torch.Tensor],
    expert_map: torch.Tensor | None,
    out: torch.Tensor | None,
    scratchpad: torch.Tensor | None,
) -> tuple[Shape, int]:
    """(shape, top_k) of a call of `fused_experts`, whose inputs go by the names FUSED.

    Raises TypeError or ValueError, naming what is wrong.
    """
    for name, tensor in zip(FUSED, inputs, strict=True):
        check_tensor(name, tensor)
    mapped = [expert_map] if expert_map is not None else []
    outs = [out] if out is not None else []
    ids_align = 8 if inputs[1].dtype == torch.int64 else 4
    contract = _fused_contract(ids_align, bool(mapped), bool(outs))
    tensors = [*inputs, *mapped, *outs]
    sizes = contract.check(tensors)
    shape = _shape(sizes, sizes["k"], FUSED[3:], inputs[3:])
    check_outputs([rule.name for rule in contract.rules], tensors, len(tensors) - len(outs))
    _check_scratchpad(scratchpad, shape, sizes["k"], inputs[0].device)
    return shape, sizes["k"]


def check_pair(routing_out: Any) -> None:
    """Raise TypeError unless `routing_out` is a pair."""
    if not isinstance(routing_out, (tuple, list)) or len(routing_out) != 2:
        raise TypeError(
            "routing_out: expected (ids int32 [M, k], weights fp32 [M, k]), got "
            f"{type(routing_out).__name__}"
        )


def check_outputs(names: Sequence[str], tensors: Sequence[torch.Tensor], inputs: int) -> None:
    """Raise ValueError where a tensor from the `inputs`-th on overlaps one before it."""
    for i in range(inputs, len(tensors)):
        check_apart(tensors[i], dict(zip(names[:i], tensors[:i], strict=True)), names[i])


def scale_names(inputs: Sequence[torch.Tensor]) -> dict[str, str]:
    """The spec's dtypes of scales, of (up weights, their scales, down weights, their scales)."""
    return {
        "scales_up_dtype": dtype_name(inputs[1].dtype),
        "scales_down_dtype": dtype_name(inputs[3].dtype),
    }


def _weight_rules(names: Sequence[str]) -> list[TensorRule]:
    """Of (up weights, their scales, down weights, their scales).

    `scale_blocks` has the shapes of the scales.
    """
    up, up_scale, down, down_scale = names
    return [
        TensorRule(up, (FP8,), ("E", "2N", "K")),
        TensorRule(up_scale, SCALES, None),
        TensorRule(down, (FP8,), ("E", "K", "N")),
        TensorRule(down_scale, SCALES, None),
    ]


@cache
def _mono_contract(logits_align: int, out: bool, top_k: int | None) -> Contract:
    """top_k: where the routing is a result."""
    rules = [
        TensorRule(MONO[0], (BF16,), ("M", "K")),
        TensorRule(MONO[1], (BF16, torch.float32), ("M", "E"), logits_align),
        *_weight_rules(MONO[2:]),
    ]
    if out:
        rules.append(TensorRule("out", (BF16,), ("M", "K")))
    if top_k is not None:
        rules.append(TensorRule(ROUTING_OUT[0], (torch.int32,), ("M", top_k), 4))
        rules.append(TensorRule(ROUTING_OUT[1], (torch.float32,), ("M", top_k), 4))
    return Contract(rules, {"M": (0, MAX_TOKENS)})


@cache
def _fused_contract(ids_align: int, mapped: bool, out: bool) -> Contract:
    rules = [
        TensorRule(FUSED[0], (BF16,), ("M", "K")),
        TensorRule(FUSED[1], (torch.int32, torch.int64), ("M", "k"), ids_align),
        TensorRule(FUSED[2], (torch.float32, BF16), ("M", "k"), 2),
        *_weight_rules(FUSED[3:]),
    ]
    bounds: dict[str, tuple[int, int | None]] = {"M": (0, MAX_TOKENS)}
    if mapped:
        rules.append(TensorRule("expert_map", (torch.int32,), ("G",), 4))
        bounds["G"] = (1, None)
    if out:
        rules.append(TensorRule("out", (BF16,), ("M", "K")))
    return Contract(rules, bounds)


def _shape(
    sizes: dict[str, int], top_k: int, names: Sequence[str], weights: Sequence[torch.Tensor]
) -> Shape:
    """What the symbols of a contract say. Raises ValueError for what no kernel takes."""
    experts, hidden, inner = sizes["E"], sizes["K"], sizes["N"]
    check_shape(experts, hidden, inner, top_k)
    up, up_scale, down, down_scale = names
    if sizes["2N"] != 2 * inner:
        raise ValueError(
            f"{up}: expected [{experts}, {2 * inner}, {hidden}], N = {inner} as in {down}; "
            f"got {list(weights[0].shape)}"
        )
    w_up, s_up, w_down, s_down = weights
    blocks = scale_blocks(w_up, s_up, w_down, s_down, (up_scale, down_scale))
    return Shape(sizes["M"], experts, hidden, inner, *blocks)


def _check_scratchpad(
    scratchpad: torch.Tensor | None, shape: Shape, top_k: int, device: torch.device
) -> None:
    if scratchpad is not None:
        scratch_layout(shape.intermediate, top_k).check(scratchpad, device)
