"""Packing tokens into expert-major order and back: the row permutations around expert GEMMs.

Symbols: T tokens, k = top_k, E experts, H features, R packed rows. A pair (expert, slot) means row
expert_offsets[expert] + slot. It is valid when 0 <= expert < E, 0 <= slot, and the row lies below
expert_offsets[expert + 1] and R; invalid pairs are dropped. T, R, E, k and the bytes of a row are
at most 2**30. All functions run on torch's current stream, have no gradients, and take CPU tensors
through `cute_moe.dispatch_reference`.

Except where they say that they synchronise, they work under torch.compile(fullgraph=True) and in
CUDA graphs, once a call like it has run outside a capture: of the same dtypes, shapes and alignment
(a kernel is compiled for the widest vector that all rows allow, the index dtypes, whether there are
few ids or many, and the power of two that E falls below). RuntimeError otherwise, and where the GPU
cannot run the kernel.
"""

from __future__ import annotations

import torch

from cute_moe import dispatch_ops as ops
from cute_moe import dispatch_reference as reference
from cute_moe.host.check import check_tensor
from cute_moe.kernels.device.options import check_bool


def dispatch(
    token_hidden: torch.Tensor,
    expert_idx: torch.Tensor,
    slot_idx: torch.Tensor,
    expert_offsets: torch.Tensor,
    *,
    num_rows: int | None = None,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """Copy every token to the row of its pair, bit by bit, and zero all other rows; one launch.

      token_hidden    [T, H], any dtype of 1, 2, 4 or 8 bytes; rows may be strided
      expert_idx      [T] int32 or int64;  slot_idx  [T] likewise
      expert_offsets  [E + 1] int32 or int64: the rows of expert e are offsets[e] .. offsets[e+1]-1
      num_rows        R; default out's rows, else expert_offsets[-1], whose reading synchronises
      out             [R, H] of token_hidden's dtype, contiguous, not overlapping an input
      validate        raise for the first invalid pair instead of dropping it; synchronises

    Returns out, or a new tensor. Pairs must be distinct and the experts' rows apart: otherwise a
    row that tokens share may hold bytes of each, and if R <= T, rows without a token may be left
    as they were. torch.compile and CUDA graphs need num_rows or out, and no `validate`.
    Raises TypeError or ValueError, naming the argument, before anything is launched or written.
    """
    _check_matrix("token_hidden", token_hidden)
    _check_tensors(expert_idx=expert_idx, slot_idx=slot_idx, expert_offsets=expert_offsets)
    if num_rows is not None:
        ops.check_rows("num_rows", num_rows)
    if out is None:
        if num_rows is None:
            ops.PAIRS.check((expert_idx, slot_idx, expert_offsets))
            num_rows = int(expert_offsets[-1])
            ops.check_rows("expert_offsets[-1]", num_rows)
        out = token_hidden.new_empty(num_rows, token_hidden.shape[1])
    else:
        _check_matrix("out", out)
        if num_rows is not None and num_rows != out.shape[0]:
            raise ValueError(f"out: expected {num_rows} rows as num_rows says, got {out.shape[0]}")
    check_bool("validate", validate)
    if validate:
        ops.PAIRS.check((expert_idx, slot_idx, expert_offsets))
        _validate_pairs(expert_idx, slot_idx, expert_offsets, out.shape[0])
    ops.dispatch(token_hidden, expert_idx, slot_idx, expert_offsets, out)
    return out


def moe_dispatch_indices(
    topk_ids: torch.Tensor, num_experts: int, *, validate: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A stable counting sort of tokens by expert; one launch for few ids, two for many.

    topk_ids [T, k] int32 or int64, contiguous, T k <= 2**24; num_experts E = 1..4096. Returns, all
    int32:
      slot_idx        [T, k]   position among the pairs of the same expert, in (token, j) order
      expert_offsets  [E + 1]  rows in front of each expert; the last is the number of valid ids
      row_token       [T k]    token of each packed row
    An id outside 0 .. E - 1 is dropped: slot -1, no row; the rows left over at the end have
    token -1. `validate` raises for the first such id instead, and synchronises. The result is the
    same in every run. Many ids need scratch memory, which is allocated.
    Raises TypeError or ValueError, naming the argument, before anything is launched.
    """
    _check_matrix("topk_ids", topk_ids)
    ops.check_experts(num_experts)
    check_bool("validate", validate)
    if validate:
        _validate_ids(topk_ids, num_experts)
    return ops.indices(topk_ids, num_experts)


def moe_permute(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_dispatch_indices`, and every token copied to its k rows, in at most two launches.

    hidden [T, H], any dtype of 1, 2, 4 or 8 bytes, rows may be strided; topk_ids, num_experts and
    validate as in `moe_dispatch_indices`, k <= 2048; out [T k, H] of hidden's dtype, contiguous,
    not overlapping an input. Returns (packed [T k, H], slot_idx, expert_offsets, row_token);
    rows left over by dropped ids are zero. A source row is read once.
    Raises TypeError or ValueError, naming the argument, before anything is launched or written.
    """
    _check_matrix("hidden", hidden)
    _check_matrix("topk_ids", topk_ids)
    ops.check_experts(num_experts)
    if out is None:
        ops.check_count(topk_ids)
        out = hidden.new_empty(topk_ids.shape[0] * topk_ids.shape[1], hidden.shape[1])
    else:
        _check_matrix("out", out)
    check_bool("validate", validate)
    if validate:
        _validate_ids(topk_ids, num_experts)
    return (out, *ops.permute(hidden, topk_ids, num_experts, out))


def combine(
    packed: torch.Tensor,
    expert_idx: torch.Tensor,
    slot_idx: torch.Tensor,
    expert_offsets: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """Sum over j of topk_weights[t, j] * packed[row of pair (t, j)], for every token; one launch.

      packed          [R, H] fp64, fp32, bf16, fp16, e4m3 or e5m2; rows may be strided
      expert_idx      [T, k] int32 or int64;  slot_idx  [T, k] likewise
      expert_offsets  [E + 1] int32 or int64
      topk_weights    [T, k] fp32, bf16 or fp16
      out             [T, H] of packed's dtype, contiguous, not overlapping an input
      validate        raise for the first invalid pair instead of leaving it out; synchronises

    Adds in fp32 (fp64 for fp64 rows) in the order of j: the same bits in every run. fp8 results
    saturate. Returns out, or a new tensor.
    Raises TypeError or ValueError, naming the argument, before anything is launched or written.
    """
    _check_matrix("packed", packed)
    _check_matrix("expert_idx", expert_idx)
    _check_tensors(slot_idx=slot_idx, expert_offsets=expert_offsets, topk_weights=topk_weights)
    if out is None:
        out = packed.new_empty(expert_idx.shape[0], packed.shape[1])
    else:
        _check_matrix("out", out)
    check_bool("validate", validate)
    if validate:
        ops.TOPK_PAIRS.check((expert_idx, slot_idx, expert_offsets, topk_weights))
        _validate_pairs(expert_idx, slot_idx, expert_offsets, packed.shape[0])
    ops.combine(packed, expert_idx, slot_idx, expert_offsets, topk_weights, out)
    return out


def _check_tensors(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        check_tensor(name, tensor)


def _check_matrix(name: str, tensor: torch.Tensor) -> None:
    check_tensor(name, tensor)
    if tensor.dim() != 2:
        raise ValueError(f"{name}: expected 2 dimensions, got shape {list(tensor.shape)}")


def _validate_pairs(
    expert_idx: torch.Tensor, slot_idx: torch.Tensor, expert_offsets: torch.Tensor, num_rows: int
) -> None:
    """Raise ValueError for the first invalid pair."""
    rows, valid = reference.rows_of(expert_idx, slot_idx, expert_offsets, num_rows)
    bad = (~valid).nonzero()
    if not len(bad):
        return
    at = tuple(bad[0].tolist())
    expert, slot, row = int(expert_idx[at]), int(slot_idx[at]), int(rows[at])
    experts = expert_offsets.numel() - 1
    where = f"at {list(at)}"
    if not 0 <= expert < experts:
        raise ValueError(f"expert_idx: expected 0..{experts - 1}, got {expert} {where}")
    start, end = expert_offsets[expert : expert + 2].tolist()
    if not 0 <= slot < end - start:
        raise ValueError(
            f"slot_idx: expected 0..{end - start - 1} for expert {expert}, got {slot} {where}"
        )
    raise ValueError(
        f"expert_offsets: expected rows 0..{num_rows - 1}, got row {row} for expert {expert}, "
        f"slot {slot} {where}"
    )


def _validate_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """Raise ValueError for the first id that is no expert."""
    ops.check_ids(topk_ids, num_experts)
    bad = ((topk_ids < 0) | (topk_ids >= num_experts)).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise ValueError(
            f"topk_ids: expected 0..{num_experts - 1}, got {int(topk_ids[at])} at {list(at)}"
        )
