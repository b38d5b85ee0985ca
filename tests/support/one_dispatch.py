"""All row permutations on small inputs, a part of them hostile, checked: for compute-sanitizer."""

import torch
from dispatch_cases import Guarded, bytes_as, draw_pairs

import cute_moe
from cute_moe import dispatch_reference as reference

HOSTILE = (-1, 1 << 20, 2**31 - 1, -(2**31))


def spoilt(indices: torch.Tensor) -> torch.Tensor:
    """Every seventh index is out of range."""
    result = indices.clone()
    flat = result.view(-1)
    bad = torch.tensor(HOSTILE, device=indices.device, dtype=indices.dtype)
    where = torch.arange(0, flat.numel(), 7, device=indices.device)
    flat[where] = bad[where % len(HOSTILE)]
    return result


def check(name: str, good: bool) -> None:
    """Print what was tried; stop at a wrong result."""
    print(name, "ok" if good else "WRONG", flush=True)
    if not good:
        raise SystemExit(1)


def dispatch(device: torch.device) -> None:
    """Vectors of 16 and of 1 byte; all rows filled, some not, many left over."""
    for dtype, columns, rows in ((torch.float32, 128, 300), (torch.uint8, 3, 300),
                                 (torch.float32, 128, 700)):  # fmt: skip
        x = bytes_as((300, columns), dtype, device)
        expert, slot, offsets = draw_pairs("random", 300, 16, device)
        for pairs in ((expert, slot), (spoilt(expert), spoilt(slot))):
            out = Guarded((rows, columns), dtype, device)
            got = cute_moe.dispatch(x, *pairs, offsets, out=out.matrix)
            want = reference.dispatch(x, *pairs, offsets, rows)
            same = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            check(f"dispatch {dtype} into {rows} rows", same and out.intact())


def permute_and_combine(device: torch.device) -> None:
    """Few tokens (one launch), many (two), and rows that bulk copies cannot move."""
    for tokens, columns in ((32, 512), (1200, 1024), (1200, 3)):
        x = torch.randn(tokens, columns, device=device)
        ids = spoilt(torch.rand(tokens, 64, device=device).topk(8, dim=1).indices.contiguous())
        packed, slots, offsets, row_token = cute_moe.moe_permute(x, ids, 64)
        check(f"permute {tokens} x {columns}", torch.equal(packed, reference.permute(x, row_token)))
        weights = torch.rand(tokens, 8, device=device)
        got = cute_moe.combine(packed, ids, slots, offsets, weights)
        valid = ((ids >= 0) & (ids < 64)) * weights
        check("combine", torch.allclose(got, x * valid.sum(1, keepdim=True), rtol=1e-4, atol=1e-4))


def main() -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    dispatch(device)
    permute_and_combine(device)


if __name__ == "__main__":
    main()
