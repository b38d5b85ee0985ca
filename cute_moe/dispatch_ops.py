"""The operators behind `cute_moe.dispatch`: what they check, and what they launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from cute_moe import dispatch_reference as reference
from cute_moe.host.check import Contract, TensorRule, check_apart, dtype_name, sized_dtypes
from cute_moe.host.device import device_facts
from cute_moe.host.launch import KernelCache, build_from
from cute_moe.kernels.device.options import check_int
from cute_moe.kernels.device.sizes import vector_bytes
from cute_moe.kernels.dispatch.spec import (
    MAX_CHUNK_ITEMS,
    MAX_EXPERTS,
    MAX_IDS,
    MAX_SIZE,
    CombineSpec,
    CountSpec,
    DispatchSpec,
    plan_combine,
    plan_dispatch,
    plan_sort,
)
from cute_moe.ops import register

_INDICES = (torch.int32, torch.int64)
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (int, torch.SymInt)
_VALUES = (torch.bfloat16, torch.float16, torch.float32, torch.float64,
           torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip


_LIMITS = {
    "T": (0, MAX_SIZE), "R": (0, MAX_SIZE), "H": (1, MAX_SIZE), "k": (0, MAX_SIZE),
    "E+1": (2, MAX_SIZE),
}  # fmt: skip


def _rows(name: str, rows: str, values: tuple[torch.dtype, ...] | None = None) -> TensorRule:
    """A matrix [rows, H] whose rows may be strided, of `values` or any dtype that is moved."""
    if values is not None:
        return TensorRule(name, values, (rows, "H"), align=1, strides="rows")
    words = "any dtype of 1, 2, 4 or 8 bytes"
    return TensorRule(name, sized_dtypes(1, 2, 4, 8), (rows, "H"), 1, "rows", words)


def _indices(name: str, *shape: int | str) -> TensorRule:
    return TensorRule(name, _INDICES, shape, align=4)


def _contract(*rules: TensorRule, **limits: tuple[int, int]) -> Contract:
    symbols = {size for rule in rules for size in rule.shape or ()}
    return Contract(rules, {s: v for s, v in {**_LIMITS, **limits}.items() if s in symbols})


_PAIRS = (_indices("expert_idx", "T"), _indices("slot_idx", "T"), _indices("expert_offsets", "E+1"))
_TOPK_PAIRS = (
    _indices("expert_idx", "T", "k"),
    _indices("slot_idx", "T", "k"),
    _indices("expert_offsets", "E+1"),
    TensorRule("topk_weights", _WEIGHTS, ("T", "k"), align=2),
)
PAIRS, TOPK_PAIRS = _contract(*_PAIRS), _contract(*_TOPK_PAIRS)
_DISPATCH = _contract(
    _rows("token_hidden", "T"),
    *_PAIRS,
    TensorRule("out", "token_hidden", ("R", "H"), align=1),
)
_TOPK_IDS = _contract(_indices("topk_ids", "T", "k"))
_PERMUTE = _contract(
    _rows("hidden", "T"),
    _indices("topk_ids", "T", "k"),
    TensorRule("out", "hidden", ("T*k", "H"), align=1),
    k=(0, MAX_CHUNK_ITEMS),
)
_COMBINE = _contract(
    _rows("packed", "R", _VALUES),
    *_TOPK_PAIRS,
    TensorRule("out", "packed", ("T", "H"), align=1),
)


def _check_row_bytes(name: str, rows: torch.Tensor) -> None:
    """Raise ValueError where a row has more than MAX_SIZE bytes."""
    if rows.shape[1] * rows.dtype.itemsize > MAX_SIZE:
        raise ValueError(
            f"{name}: expected rows of at most {MAX_SIZE} bytes, got shape {list(rows.shape)} "
            f"{dtype_name(rows.dtype)}"
        )


def check_rows(name: str, count: int) -> None:
    """Raise unless `count` is a possible number of packed rows."""
    check_int(name, count, 0, MAX_SIZE, _INTS)


def check_experts(num_experts: int) -> None:
    """Raise unless a sort takes as many experts."""
    check_int("num_experts", num_experts, 1, MAX_EXPERTS, _INTS)


def check_count(topk_ids: torch.Tensor) -> None:
    """Raise ValueError for more ids than a sort takes."""
    if topk_ids.numel() > MAX_IDS:
        raise ValueError(f"topk_ids: expected T * k <= {MAX_IDS}, got {list(topk_ids.shape)}")


def check_ids(topk_ids: torch.Tensor, num_experts: int, *, fake: bool = False) -> None:
    """Raise unless the ids are a [T, k] matrix of indices and E and T * k are within the limits."""
    _TOPK_IDS.check((topk_ids,), fake=fake)
    check_experts(num_experts)
    check_count(topk_ids)


def _check_dispatch(
    token_hidden: torch.Tensor,
    expert_idx: torch.Tensor,
    slot_idx: torch.Tensor,
    expert_offsets: torch.Tensor,
    out: torch.Tensor,
    *,
    fake: bool = False,
) -> None:
    """All that needs no addresses."""
    tensors = (token_hidden, expert_idx, slot_idx, expert_offsets, out)
    _DISPATCH.check(tensors, fake=fake)
    _check_row_bytes("token_hidden", token_hidden)


def _check_permute(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    out: torch.Tensor,
    *,
    fake: bool = False,
) -> None:
    """All that needs no addresses."""
    check_experts(num_experts)
    sizes = _PERMUTE.check((hidden, topk_ids, out), fake=fake)
    check_count(topk_ids)
    if sizes["T*k"] != sizes["T"] * sizes["k"]:
        rows = sizes["T"] * sizes["k"]
        raise ValueError(f"out: expected {rows} rows, T * k of topk_ids, got {list(out.shape)}")
    _check_row_bytes("hidden", hidden)


def _check_combine(
    packed: torch.Tensor,
    expert_idx: torch.Tensor,
    slot_idx: torch.Tensor,
    expert_offsets: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    *,
    fake: bool = False,
) -> None:
    """All that needs no addresses."""
    tensors = (packed, expert_idx, slot_idx, expert_offsets, topk_weights, out)
    _COMBINE.check(tensors, fake=fake)
    _check_row_bytes("packed", packed)


_KERNELS = KernelCache(build_from("cute_moe.kernels.dispatch.build"))
_plan_sort = functools.lru_cache(maxsize=1024)(plan_sort)


def _vector(out: torch.Tensor, source: torch.Tensor) -> int:
    """Bytes of the widest load and store that both row matrices allow; `out` is contiguous."""
    size = out.element_size()
    stride = source.stride(0) * size if source.shape[0] > 1 else 0
    return vector_bytes(out.data_ptr(), out.shape[1] * size, source.data_ptr(), stride)


def _check_apart(contract: Contract, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Raise ValueError where `out`, the last tensor of the contract, overlaps one before it."""
    check_apart(out, {rule.name: x for rule, x in zip(contract.rules, inputs, strict=False)})


def _run_dispatch(
    token_hidden: torch.Tensor,
    expert_idx: torch.Tensor,
    slot_idx: torch.Tensor,
    expert_offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    device, tokens = token_hidden.device, token_hidden.shape[0]
    pairs = (expert_idx, slot_idx, expert_offsets)
    _check_dispatch(token_hidden, *pairs, out)
    _check_apart(_DISPATCH, (token_hidden, *pairs), out)
    if device.type != "cuda":
        out.copy_(reference.dispatch(token_hidden, *pairs, out.shape[0]))
    elif tokens == 0:
        reference.as_bytes(out).zero_()
    elif out.numel():
        expert, slot, offset = (dtype_name(tensor.dtype) for tensor in pairs)
        spec = DispatchSpec(_vector(out, token_hidden), expert, slot, offset)
        source, target = map(reference.as_bytes, (token_hidden, out))
        rows, row_bytes = target.shape
        plan = plan_dispatch(spec, tokens, rows, row_bytes, device_facts(device.index).sm_count)
        _KERNELS.launch(spec, device, source, pairs, target, (plan.lanes, plan.rows, plan.extra))


def _run_indices(
    topk_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_ids(topk_ids, num_experts)
    if topk_ids.device.type != "cuda":
        return reference.dispatch_indices(topk_ids, num_experts)
    return _sort(topk_ids, num_experts)


def _run_permute(
    hidden: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_permute(hidden, topk_ids, num_experts, out)
    _check_apart(_PERMUTE, (hidden, topk_ids), out)
    if hidden.device.type != "cuda":
        slots, offsets, row_token = reference.dispatch_indices(topk_ids, num_experts)
        out.copy_(reference.permute(hidden, row_token))
        return slots, offsets, row_token
    return _sort(topk_ids, num_experts, hidden, out)


def _sort(
    topk_ids: torch.Tensor,
    num_experts: int,
    hidden: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots, offsets and row tokens on the GPU; with `hidden`, its rows go to `out`."""
    (tokens, k), device = topk_ids.shape, topk_ids.device
    slots = topk_ids.new_empty((tokens, k), dtype=torch.int32)
    offsets = topk_ids.new_empty(num_experts + 1, dtype=torch.int32)
    row_token = topk_ids.new_empty(tokens * k, dtype=torch.int32)
    if tokens * k == 0:
        offsets.zero_()
        return slots, offsets, row_token
    ids, id_dtype = topk_ids.view(-1), dtype_name(topk_ids.dtype)
    vector, row_bytes, rows = 0, 0, None
    if hidden is not None and out is not None:
        vector, rows = _vector(out, hidden), tuple(map(reference.as_bytes, (hidden, out)))
        row_bytes = rows[1].shape[1]
    sm_count = device_facts(device.index).sm_count
    plan = _plan_sort(tokens, k, num_experts, id_dtype, vector, row_bytes, sm_count)
    counts = None
    if not plan.spec.alone:
        counts = topk_ids.new_empty((plan.chunks, num_experts + 1), dtype=torch.int32)
        unit = 1 if hidden is None else k
        count = CountSpec(plan.spec.capacity, id_dtype, 256 if plan.spec.bulk else 1024)
        _KERNELS.launch(count, device, ids, counts, unit)
    result = (slots.view(-1), row_token, offsets)
    sizes = (num_experts, k, plan.chunks, plan.parts)
    _KERNELS.launch(plan.spec, device, ids, counts, result, rows, sizes)
    return slots, offsets, row_token


def _run_combine(
    packed: torch.Tensor,
    expert_idx: torch.Tensor,
    slot_idx: torch.Tensor,
    expert_offsets: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    device, pairs = packed.device, (expert_idx, slot_idx, expert_offsets)
    _check_combine(packed, *pairs, topk_weights, out)
    _check_apart(_COMBINE, (packed, *pairs, topk_weights), out)
    if device.type != "cuda":
        out.copy_(reference.combine(packed, *pairs, topk_weights))
    elif packed.shape[0] == 0 or expert_idx.shape[1] == 0:
        reference.as_bytes(out).zero_()
    elif out.numel():
        expert, slot, offset = (dtype_name(tensor.dtype) for tensor in pairs)
        value, weight = dtype_name(packed.dtype), dtype_name(topk_weights.dtype)
        spec = CombineSpec(_vector(out, packed), value, weight, expert, slot, offset)
        row_bytes = out.shape[1] * out.element_size()
        plan = plan_combine(spec, out.shape[0], row_bytes, device_facts(device.index).sm_count)
        sizes = (plan.lanes, plan.rows, plan.extra)
        _KERNELS.launch(spec, device, packed.detach(), pairs, topk_weights.detach(), out, sizes)


def _fake_indices(
    topk_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_ids(topk_ids, num_experts, fake=True)
    slots = topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)
    offsets = slots.new_empty(num_experts + 1)
    return slots, offsets, slots.new_empty(topk_ids.numel())


def _fake_permute(
    hidden: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_permute(hidden, topk_ids, num_experts, out, fake=True)
    return _fake_indices(topk_ids, num_experts)


dispatch = register(
    "dispatch(Tensor token_hidden, Tensor expert_idx, Tensor slot_idx, Tensor expert_offsets, "
    "Tensor(a!) out) -> ()",
    _run_dispatch,
    functools.partial(_check_dispatch, fake=True),
)
indices = register(
    "moe_dispatch_indices(Tensor topk_ids, int num_experts) -> (Tensor, Tensor, Tensor)",
    _run_indices,
    _fake_indices,
)
permute = register(
    "moe_permute(Tensor hidden, Tensor topk_ids, int num_experts, Tensor(a!) out) "
    "-> (Tensor, Tensor, Tensor)",
    _run_permute,
    _fake_permute,
)
combine = register(
    "combine(Tensor packed, Tensor expert_idx, Tensor slot_idx, Tensor expert_offsets, "
    "Tensor topk_weights, Tensor(a!) out) -> ()",
    _run_combine,
    functools.partial(_check_combine, fake=True),
)
