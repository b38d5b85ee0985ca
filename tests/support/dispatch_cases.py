"""Inputs of the row-permutation tests: routings, random bytes, outputs between pages of poison."""

import torch

from cute_moe import dispatch_reference as reference

POISON = 0xA5
PAGE = 4096
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.float32,
    torch.complex64,
    torch.float64,
    torch.int64,
)


def bytes_as(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random bytes as a matrix of `dtype` (bool: zeros and ones)."""
    high = 2 if dtype == torch.bool else 256
    sizes = (shape[0], shape[1] * dtype.itemsize)
    return torch.randint(high, sizes, dtype=torch.uint8, device=device).view(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors agree in shape, dtype and every bit."""
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    return same_kind and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class Guarded:
    """A contiguous matrix with a page of poison on both sides, all of it poison at first."""

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, shift: int = 0
    ) -> None:
        """`shift`: bytes of the matrix past 16-byte alignment, a multiple of the item size."""
        size = shape[0] * shape[1] * dtype.itemsize
        self._bytes = torch.full((size + 2 * PAGE + 16,), POISON, dtype=torch.uint8, device=device)
        start = PAGE + shift
        self._ends = (start, start + size)
        self.matrix = self._bytes[start : start + size].view(dtype).view(shape)

    def intact(self) -> bool:
        """Whether the poison on both sides is still there."""
        start, end = self._ends
        return bool((self._bytes[:start] == POISON).all() and (self._bytes[end:] == POISON).all())

    def untouched(self) -> bool:
        """Whether nothing at all has been written."""
        return bool((self._bytes == POISON).all())


def draw_experts(kind: str, tokens: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """expert_idx [T] int64 of one of ROUTINGS; with "few", most experts have no token."""
    if kind == "cyclic":
        return torch.arange(tokens, device=device) % num_experts
    if kind == "one":
        return torch.full((tokens,), num_experts - 1, device=device)
    used = max(num_experts // 8, 1) if kind == "few" else num_experts
    return torch.randint(used, (tokens,), device=device) * (num_experts // used)


ROUTINGS = ("cyclic", "random", "one", "few")


def draw_pairs(
    kind: str, tokens: int, num_experts: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """expert_idx, slot_idx (a random order within every expert), expert_offsets, all int64."""
    experts = draw_experts(kind, tokens, num_experts, device)
    shuffle = torch.randperm(tokens, device=device)
    shuffled, offsets, _ = reference.dispatch_indices(experts[shuffle, None], num_experts)
    slots = torch.empty_like(experts)
    slots[shuffle] = shuffled[:, 0].long()
    return experts, slots, offsets.long()
