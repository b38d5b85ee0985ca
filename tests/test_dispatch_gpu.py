"""Dispatch, sort, permute and combine on the GPU, against the torch reference."""

import random

import pytest
import torch
from dispatch_cases import (
    DTYPES,
    ROUTINGS,
    Guarded,
    bytes_as,
    draw_experts,
    draw_pairs,
    same_bytes,
)

import cute_moe
from cute_moe import dispatch_ops as ops
from cute_moe import dispatch_reference as reference
from cute_moe.kernels.device.sizes import vector_bytes

pytestmark = pytest.mark.gpu
INDEX_OF_VECTOR = {1: torch.int32, 2: torch.int64, 4: torch.int32, 8: torch.int64, 16: torch.int32}


def spoil(indices: torch.Tensor, share: float, limit: int) -> torch.Tensor:
    """A copy in which a `share` of the indices is out of range, `limit` and up or negative."""
    top = torch.iinfo(indices.dtype).max
    choices = torch.tensor([-1, limit, limit + 1, top, -top - 1], device=indices.device)
    bad = torch.rand(indices.shape, device=indices.device) < share
    drawn = choices[torch.randint(len(choices), indices.shape, device=indices.device)]
    return torch.where(bad, drawn, indices.long()).to(indices.dtype)


def rows_of_bytes(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, pad: int, shift: int
) -> torch.Tensor:
    """Random rows with `pad` elements between them, `shift` elements past an aligned address."""
    if not shape[0]:
        return torch.empty(shape, dtype=dtype, device=device)
    flat = bytes_as((1, shape[0] * (shape[1] + pad) + shift), dtype, device)[0, shift:]
    return flat.as_strided(shape, (shape[1] + pad, 1), flat.storage_offset())


def check_dispatch(x: torch.Tensor, pairs: tuple, rows: int, shift: int) -> None:
    """Bit for bit the reference's result, and nothing written beside it."""
    out = Guarded((rows, x.shape[1]), x.dtype, x.device, shift)
    assert cute_moe.dispatch(x, *pairs, out=out.matrix) is out.matrix
    assert same_bytes(out.matrix, reference.dispatch(x, *pairs, rows))
    assert out.intact()


def check_shared_rows(x: torch.Tensor, pairs: tuple, rows: int) -> None:
    """As check_dispatch, where tokens may share rows: such rows may hold anything."""
    out = Guarded((rows, x.shape[1]), x.dtype, x.device)
    cute_moe.dispatch(x, *pairs, out=out.matrix)
    assert out.intact()
    targets, valid = reference.rows_of(*pairs, rows)
    tokens = torch.bincount(targets[valid], minlength=rows)
    certain = tokens == 1
    if rows > len(x) or not valid.all():
        certain |= tokens == 0
    want = reference.dispatch(x, *pairs, rows)
    assert same_bytes(out.matrix[certain], want[certain])


def test_dispatch_of_240_random_shapes(cuda) -> None:
    for seed in range(240):
        draw = random.Random(seed)
        dtype = draw.choice(DTYPES)
        tokens, columns = draw.choice((0, 1, 2, 31, 100, 777, 3000)), draw.randint(1, 300)
        if draw.random() < 0.5:  # Rows that whole vectors of 16 bytes fit into.
            columns = -(-columns // 16) * 16
        pad, shift = draw.choice(((0, 0), (0, 1), (3, 0), (16, 0)))
        x = rows_of_bytes((tokens, columns), dtype, cuda, pad, shift)
        experts = draw.choice((1, 2, 16, 200))
        expert, slot, offsets = draw_pairs(draw.choice(ROUTINGS), tokens, experts, cuda)
        offsets[-1] += draw.choice((0, 0, 7, 1000))
        rows = max(tokens + draw.choice((-20, 0, 0, 0, 1, 50, 2000)), 0)
        size = dtype.itemsize
        stride = (columns + pad) * size
        vector = vector_bytes(shift * size, columns * size, stride)
        index = INDEX_OF_VECTOR[vector]
        pairs = [expert.to(index), slot.to(index), offsets.to(index)]
        if draw.random() < 0.3:
            pairs[0] = spoil(pairs[0], 0.1, experts)
            pairs[1] = spoil(pairs[1], 0.1, 1 << 20)
        check_dispatch(x, tuple(pairs), rows, shift * size)


@pytest.mark.parametrize("columns", [1, 3, 100, 2880, 7168])
def test_dispatch_of_named_sizes(cuda, columns: int) -> None:
    for kind in ROUTINGS:
        for tokens in (1, 2048):
            x = bytes_as((tokens, columns), torch.bfloat16, cuda)
            expert, slot, offsets = draw_pairs(kind, tokens, 16, cuda)
            check_dispatch(x, (expert.int(), slot.int(), offsets.int()), tokens, 0)


def test_dispatch_of_the_reference_input(cuda) -> None:
    x = torch.randn(2048, 128, device=cuda)
    expert = torch.arange(2048, device=cuda, dtype=torch.int32) % 16
    slot = torch.arange(2048, device=cuda, dtype=torch.int32) // 16
    offsets = torch.arange(0, 2049, 128, device=cuda, dtype=torch.int32)
    got = cute_moe.dispatch(x, expert, slot, offsets)
    assert torch.equal(got, x.view(128, 16, 128).transpose(0, 1).reshape(2048, 128))


@pytest.mark.parametrize("rows", [1, 999, 1000, 5000])
def test_hostile_indices_leave_zeros(cuda, rows: int) -> None:
    x = bytes_as((1000, 24), torch.float32, cuda)
    for share in (0.001, 0.5, 1.0):
        expert, slot, offsets = draw_pairs("random", 1000, 8, cuda)
        for dtype in (torch.int32, torch.int64):
            pairs = [expert.to(dtype), slot.to(dtype), offsets.to(dtype)]
            for which in (0, 1):
                spoilt = list(pairs)
                spoilt[which] = spoil(pairs[which], share, 1000)
                check_dispatch(x, tuple(spoilt), rows, 0)
            bounds = spoil(pairs[2], share / 2, 1000)
            check_shared_rows(x, (*pairs[:2], bounds), rows)


def test_dispatch_beyond_2_31_bytes(cuda) -> None:
    x = torch.randint(256, (155_000, 14_336), dtype=torch.uint8, device=cuda)
    expert, slot, offsets = draw_pairs("random", 155_000, 64, cuda)
    got = cute_moe.dispatch(x, expert, slot, offsets, num_rows=155_003)
    rows = offsets[expert] + slot
    some = torch.arange(0, 155_000, 997, device=cuda)
    assert torch.equal(got[rows[some]], x[some])
    assert not got[155_000:].any()
    assert torch.equal(got.sum(1, dtype=torch.int32)[rows], x.sum(1, dtype=torch.int32))


SORTS = [(1, 1, 1), (3, 2, 4096), (32, 8, 128), (1000, 1, 7), (700, 3, 60), (4096, 8, 128),
         (5000, 2, 1000), (131_072, 8, 64), (1, 1 << 20, 64), (1 << 20, 1, 60)]  # fmt: skip


@pytest.mark.parametrize("tokens, top_k, experts", SORTS)
def test_indices(cuda, tokens: int, top_k: int, experts: int) -> None:
    for kind in ROUTINGS:
        ids = draw_experts(kind, tokens * top_k, experts, cuda).view(tokens, top_k)
        for share in (0.0, 0.1):
            ids = spoil(ids, share, experts)
            got = cute_moe.moe_dispatch_indices(ids, experts)
            for mine, want in zip(got, reference.dispatch_indices(ids, experts), strict=True):
                assert torch.equal(mine, want)
            again = cute_moe.moe_dispatch_indices(ids, experts)
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_permute_of_60_random_shapes(cuda) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        tokens, top_k = draw.choice((0, 1, 7, 40, 500, 3000)), draw.choice((1, 2, 5, 8))
        dtype = draw.choice((torch.uint8, torch.float32))
        columns = draw.choice((1, 3, 16, 64, 1024)) * (1 if dtype is torch.uint8 else 4)
        experts = draw.choice((1, 20, 64))
        ids = draw_experts(draw.choice(ROUTINGS), tokens * top_k, experts, cuda)
        ids = spoil(ids.view(tokens, top_k), draw.choice((0.0, 0.1, 1.0)), experts)
        x = rows_of_bytes((tokens, columns), dtype, cuda, draw.choice((0, 4)), 0)
        out = Guarded((tokens * top_k, columns), dtype, cuda)
        packed, *result = cute_moe.moe_permute(x, ids, experts, out=out.matrix)
        want = reference.dispatch_indices(ids, experts)
        assert all(torch.equal(a, b) for a, b in zip(result, want, strict=True))
        assert packed is out.matrix and out.intact()
        assert same_bytes(packed, reference.permute(x, want[2]))


@pytest.mark.parametrize("tokens", [32, 4096])
def test_permute_of_the_named_sizes(cuda, tokens: int) -> None:
    x = bytes_as((tokens, 7168), torch.bfloat16, cuda)
    ids = torch.rand(tokens, 128, device=cuda).topk(8, dim=1).indices
    packed, slots, offsets, row_token = cute_moe.moe_permute(x, ids, 128)
    assert same_bytes(packed, reference.permute(x, row_token))
    rows, valid = reference.rows_of(ids, slots, offsets, tokens * 8)
    assert valid.all()
    assert same_bytes(packed[rows.view(-1)], x.repeat_interleave(8, dim=0))


COMBINES = [
    (torch.bfloat16, torch.float32, 7168), (torch.bfloat16, torch.bfloat16, 96),
    (torch.float16, torch.float16, 33), (torch.float32, torch.float32, 1),
    (torch.float64, torch.float32, 50), (torch.float8_e4m3fn, torch.float32, 160),
    (torch.float8_e5m2, torch.float32, 7),
]  # fmt: skip


@pytest.mark.parametrize("dtype, weight_dtype, columns", COMBINES)
def test_combine(cuda, dtype: torch.dtype, weight_dtype: torch.dtype, columns: int) -> None:
    for tokens, top_k, experts in ((1, 8, 128), (37, 1, 3), (300, 8, 64), (600, 11, 20)):
        ids = draw_experts("random", tokens * top_k, experts, cuda).view(tokens, top_k)
        ids = spoil(ids, 0.05, experts)
        slots, offsets, _ = reference.dispatch_indices(ids, experts)
        weights = torch.rand(tokens, top_k, device=cuda).to(weight_dtype)
        wide = torch.randn(tokens * top_k, columns + 5, device=cuda).to(dtype)
        for packed in (wide[:, :columns], wide[:, :columns].contiguous()):
            arguments = (packed, ids, slots, offsets, weights)
            out = Guarded((tokens, columns), dtype, cuda)
            got = cute_moe.combine(*arguments, out=out.matrix)
            want = reference.combine(packed.double(), *arguments[1:]).to(dtype)
            # Beside the rounding of the result, the sum itself has fp32 rounding errors.
            limits = torch.finfo(dtype)
            tiny = limits.smallest_normal * limits.eps
            sums = 1e-12 if dtype == torch.float64 else 2e-5
            torch.testing.assert_close(
                got.double(), want.double(), rtol=max(limits.eps, sums), atol=max(tiny, sums)
            )
            assert out.intact()
            assert same_bytes(got.clone(), cute_moe.combine(*arguments))


def test_combine_of_rows_beyond_its_experts(cuda) -> None:
    packed = torch.full((6, 8), torch.nan, device=cuda)
    ids, slots = torch.tensor([[0, 1, 5]], device=cuda), torch.tensor([[2, -1, 0]], device=cuda)
    offsets = torch.tensor([0, 2, 6], device=cuda)
    got = cute_moe.combine(packed, ids, slots, offsets, torch.ones(1, 3, device=cuda))
    assert torch.equal(got, torch.zeros(1, 8, device=cuda))


def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All four functions."""
    packed, slots, offsets, _ = cute_moe.moe_permute(x, ids, 16)
    out = cute_moe.combine(packed, ids, slots, offsets, weights)
    slot_idx, ends, row_token = cute_moe.moe_dispatch_indices(ids[:, :1].contiguous(), 16)
    first = cute_moe.dispatch(
        x, ids[:, 0].contiguous(), slot_idx.view(-1), ends, num_rows=x.shape[0] + 2
    )
    return packed, out, row_token, first


@pytest.mark.parametrize("tokens", [50, 3000])
def test_cuda_graph(cuda, tokens: int) -> None:
    x, weights = torch.randn(tokens, 64, device=cuda), torch.rand(tokens, 4, device=cuda)
    ids = torch.randint(16, (tokens, 4), device=cuda)
    layer(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, ids, weights)
    for _ in range(3):
        x.normal_()
        ids.copy_(torch.randint(-1, 17, ids.shape, device=cuda))
        graph.replay()
        for got, want in zip(captured, layer(x, ids, weights), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("columns", [64, 1024])
def test_launches_in_a_row_see_each_other(cuda, columns: int) -> None:
    """Every launch starts before the one ahead has ended, and reads what that one writes."""
    tokens = 1500
    start = torch.randn(tokens, columns, device=cuda)
    ids = torch.randint(16, (tokens, 4), device=cuda)
    weights = torch.full((tokens, 4), 0.25, device=cuda)
    expert, slot, offsets = draw_pairs("random", tokens, 16, cuda)

    def chain() -> list[torch.Tensor]:
        results, x = [], start
        for _ in range(8):
            x = cute_moe.dispatch(x, expert, slot, offsets, num_rows=tokens)
            packed, slots, ends, _ = cute_moe.moe_permute(x, ids, 16)
            x = cute_moe.combine(packed, ids, slots, ends, weights)
            results += [packed, x]
        return results

    want, x = [], start
    for _ in range(8):
        x = reference.dispatch(x, expert, slot, offsets, tokens)
        slots, ends, row_token = reference.dispatch_indices(ids, 16)
        want += [reference.permute(x, row_token), x]
    first = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for results in (first, chain(), captured):
        if results is captured:
            graph.replay()
        # A quarter of a value four times is the value, to the bit.
        assert all(torch.equal(a, b) for a, b in zip(results, want, strict=True))


def test_current_stream(cuda) -> None:
    x = torch.zeros(64, 32, device=cuda)
    expert, slot, offsets = draw_pairs("random", 64, 4, cuda)
    cute_moe.dispatch(x, expert, slot, offsets, num_rows=64)
    stream = torch.cuda.Stream(cuda)
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(5)
        got = cute_moe.dispatch(x, expert, slot, offsets, num_rows=64)
    stream.synchronize()
    assert torch.equal(got, torch.full_like(got, 5))


def test_no_sync_and_no_allocation_with_out(cuda) -> None:
    x = torch.randn(64, 32, device=cuda)
    expert, slot, offsets = draw_pairs("random", 64, 4, cuda)
    packed, weights = torch.empty_like(x), torch.rand(64, 1, device=cuda)
    pairs = (expert[:, None], slot[:, None], offsets)
    back = torch.empty_like(x)

    def both() -> None:
        cute_moe.dispatch(x, expert, slot, offsets, out=packed)
        cute_moe.combine(packed, *pairs, weights, out=back)

    both()
    before = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(cuda)["allocation.all.allocated"] == before
    assert torch.equal(back, x * weights)


def test_torch_compile_and_opcheck(cuda) -> None:
    inputs = (torch.randn(9, 8, device=cuda), torch.randint(16, (9, 2), device=cuda),
              torch.rand(9, 2, device=cuda))  # fmt: skip
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(*inputs), layer(*inputs), strict=True):
        assert torch.equal(got, want)
    out = torch.empty(18, 8, device=cuda)
    results = torch.library.opcheck(ops.permute, (*inputs[:2], 16, out))
    assert set(results.values()) == {"SUCCESS"}


def test_writes_into_out_are_changes_in_place(cuda) -> None:
    x = torch.randn(9, 8, device=cuda)
    expert, slot, offsets = draw_pairs("random", 9, 3, cuda)
    ids, slots, weights = expert[:, None], slot[:, None], torch.rand(9, 1, device=cuda)
    weight = torch.ones(9, 8, device=cuda, requires_grad=True)
    for write in (
        lambda out: cute_moe.dispatch(x, expert, slot, offsets, out=out),
        lambda out: cute_moe.moe_permute(x, ids, 3, out=out),
        lambda out: cute_moe.combine(x, ids, slots, offsets, weights, out=out),
    ):
        out = torch.zeros(9, 8, device=cuda)
        product = (weight * out).sum()
        write(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_gradients_are_not_recorded(cuda) -> None:
    x = torch.randn(9, 8, device=cuda, requires_grad=True)
    ids = torch.randint(16, (9, 2), device=cuda)
    weights = torch.rand(9, 2, device=cuda, requires_grad=True)
    assert not any(t.requires_grad for t in layer(x, ids, weights))


def test_validate(cuda) -> None:
    x = torch.randn(9, 8, device=cuda)
    expert, slot, offsets = draw_pairs("random", 9, 3, cuda)
    assert cute_moe.dispatch(x, expert, slot, offsets, validate=True).shape == (9, 8)
    expert[7] = 3
    out = Guarded((9, 8), torch.float32, cuda)
    with pytest.raises(ValueError, match=r"expert_idx: expected 0..2, got 3 at \[7\]"):
        cute_moe.dispatch(x, expert, slot, offsets, out=out.matrix, validate=True)
    assert out.untouched()


def test_tensors_of_two_devices_are_rejected(cuda) -> None:
    x = torch.randn(9, 8, device=cuda)
    expert, slot, offsets = draw_pairs("random", 9, 3, cuda)
    with pytest.raises(ValueError, match="expert_idx: expected .* on cuda:0, .*; got .* on cpu"):
        cute_moe.dispatch(x, expert.cpu(), slot, offsets, num_rows=9)
