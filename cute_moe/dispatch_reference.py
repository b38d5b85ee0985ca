"""The torch reference of the row permutations; it is also their CPU path.

Symbols: T tokens, k = top_k, E experts, H features, R packed rows. A pair (expert, slot) means row
expert_offsets[expert] + slot; it is valid when 0 <= expert < E, 0 <= slot, and the row lies below
expert_offsets[expert + 1] and R.
"""

import torch

SUM_DTYPES = {torch.float64: torch.float64}  # of rows of that dtype; fp32 for all others


def rows_of(
    expert_idx: torch.Tensor, slot_idx: torch.Tensor, expert_offsets: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of every pair (int64) and whether it is valid (bool), both in the shape of the pairs.

    Rows of invalid pairs are arbitrary numbers.
    """
    offsets, slots = expert_offsets.long(), slot_idx.long()
    known = (expert_idx >= 0) & (expert_idx < offsets.numel() - 1)
    experts = torch.where(known, expert_idx.long(), 0)
    starts, ends = offsets[experts], offsets[experts + 1]
    rows = starts + slots
    valid = known & (slots >= 0) & (starts >= 0) & (rows >= 0) & (rows < ends) & (rows < num_rows)
    return rows, valid


def dispatch(
    token_hidden: torch.Tensor,
    expert_idx: torch.Tensor,
    slot_idx: torch.Tensor,
    expert_offsets: torch.Tensor,
    num_rows: int,
) -> torch.Tensor:
    """Token t goes to its pair's row: [T, H], [T], [T], [E + 1] -> [R, H]; other rows are zero."""
    rows, valid = rows_of(expert_idx, slot_idx, expert_offsets, num_rows)
    out = token_hidden.new_zeros(num_rows, token_hidden.shape[1])
    # Bytes: not every dtype has an indexed assignment.
    as_bytes(out)[rows[valid]] = as_bytes(token_hidden)[valid]
    return out


def dispatch_indices(
    topk_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stable sort of ids [T, k]: slot_idx [T, k], expert_offsets [E + 1], row_token [T k].

    All int32. An id outside 0 .. E - 1 has slot -1; such items sort last, and their rows have
    token -1.
    """
    ids = topk_ids.reshape(-1).long()
    buckets = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    ends = torch.bincount(buckets, minlength=num_experts + 1).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    order = buckets.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(ids.numel(), device=ids.device)
    slots = torch.where(buckets < num_experts, rows - offsets[buckets], -1)
    tokens = torch.where(buckets[order] < num_experts, order // max(topk_ids.shape[1], 1), -1)
    return slots.view(topk_ids.shape).int(), offsets[:-1].int(), tokens.int()


def permute(hidden: torch.Tensor, row_token: torch.Tensor) -> torch.Tensor:
    """Row r is token row_token[r], or zero for -1: [T, H], [R] -> [R, H]."""
    out = hidden.new_zeros(row_token.numel(), hidden.shape[1])
    valid = row_token >= 0
    as_bytes(out)[valid] = as_bytes(hidden)[row_token[valid].long()]
    return out


def combine(
    packed: torch.Tensor,
    expert_idx: torch.Tensor,
    slot_idx: torch.Tensor,
    expert_offsets: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum over j in order: [R, H], three of [T, k], [E + 1] -> [T, H].

    The sum is fp32, or fp64 for fp64 rows; invalid pairs add nothing; fp8 results saturate.
    """
    rows, valid = rows_of(expert_idx, slot_idx, expert_offsets, packed.shape[0])
    kind = SUM_DTYPES.get(packed.dtype, torch.float32)
    total = torch.zeros(rows.shape[0], packed.shape[1], dtype=kind, device=packed.device)
    for j in range(rows.shape[1]):
        use = valid[:, j]
        terms = as_bytes(packed)[rows[use, j]].view(packed.dtype).to(kind)
        total[use] += topk_weights[use, j, None].to(kind) * terms
    if packed.dtype.itemsize == 1:
        limit = torch.finfo(packed.dtype).max
        total = total.clamp(-limit, limit)
    return total.to(packed.dtype)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 [rows, bytes of a row]; the elements of a row lie side by side."""
    if rows.stride(1) != 1:  # Only rows of one element may say anything else.
        rows = rows.as_strided(rows.shape, (rows.stride(0), 1))
    return rows.view(torch.uint8)
