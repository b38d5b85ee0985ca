"""Plans and specs of the row permutations, vector widths, and operator registration."""

import itertools

import pytest
import torch

from cute_moe.kernels.device.sizes import SMEM_LIMIT, vector_bytes
from cute_moe.kernels.dispatch.spec import (
    MAX_CHUNK_ITEMS,
    MAX_EXPERTS,
    MAX_GRID_Y,
    MAX_IDS,
    MAX_SIZE,
    WARP,
    CombineSpec,
    CountSpec,
    DispatchSpec,
    plan_combine,
    plan_dispatch,
    plan_sort,
    row_lanes,
)
from cute_moe.ops import register

SMS = 132
TOKENS = (1, 2, 31, 32, 132, 133, 1000, 4096, 131_072, 1 << 20)


@pytest.mark.parametrize(
    "multiples, width",
    [
        ((), 16),
        ((0, 0), 16),
        ((32, 48), 16),
        ((24, 0), 8),
        ((1 << 40, 12), 4),
        ((6,), 2),
        ((7,), 1),
    ],
)
def test_vector_bytes(multiples: tuple[int, ...], width: int) -> None:
    assert vector_bytes(*multiples) == width


def test_lanes_cover_a_row_in_as_few_passes_as_all_threads_would() -> None:
    for vectors in [*range(1, 1200), 8192, 65_536]:
        lanes = row_lanes(vectors, 256)
        assert lanes % WARP == 0 or WARP % lanes == 0
        assert lanes <= 256
        assert -(-vectors // lanes) == -(-vectors // 256)
    assert row_lanes(896, 256) == 224


def test_dispatch_zeroes_beside_the_copies_only_when_rows_are_to_spare() -> None:
    spec = DispatchSpec(16)
    for tokens, more in itertools.product(TOKENS, (-1, 0)):
        assert plan_dispatch(spec, tokens, tokens + more, 512, SMS).extra == 0
    few, many = (plan_dispatch(spec, 100, 100 + n, 4096, SMS) for n in (1, 1 << 20))
    assert (few.extra, many.extra) == (8, SMS)
    assert few.lanes * few.rows == spec.threads


def test_combine_splits_columns_of_few_tokens() -> None:
    spec = CombineSpec(16, "bfloat16", "float32", "int64", "int32", "int32")
    for tokens, vectors in itertools.product(TOKENS, (1, 3, 16, 100, 896)):
        plan = plan_combine(spec, tokens, 16 * vectors, SMS)
        assert plan.rows >= 1 and plan.lanes * plan.rows <= spec.threads
        assert (plan.lanes * plan.rows) % WARP == 0
        assert plan.extra * plan.lanes < vectors + plan.lanes
        assert plan.extra == 1 or plan.extra * plan.lanes >= vectors
    narrow = CombineSpec(1, "float8_e4m3fn", "float32", "int64", "int32", "int32")
    assert plan_combine(narrow, 1, MAX_SIZE - 1, SMS).extra == MAX_GRID_Y
    assert plan_combine(spec, 32, 7168 * 2, SMS).extra == 7
    assert plan_combine(spec, 4096, 7168 * 2, SMS).extra == 1


@pytest.mark.parametrize("num_experts", [1, 64, 65, 128, 1000, MAX_EXPERTS])
@pytest.mark.parametrize(
    "vector, row_bytes", [(0, 0), (1, 3), (1, 3 << 20), (16, 512), (16, 14_336)]
)
def test_sort_plans_fit(num_experts: int, vector: int, row_bytes: int) -> None:
    for tokens, top_k in itertools.product(TOKENS, (1, 8, 100, MAX_CHUNK_ITEMS)):
        if tokens * top_k > MAX_IDS:
            continue
        plan = plan_sort(tokens, top_k, num_experts, "int64", vector, row_bytes, SMS)
        spec = plan.spec
        assert num_experts <= spec.capacity and spec.capacity.bit_count() == 1
        assert spec.rank_warps >= 1 and spec.smem_bytes <= SMEM_LIMIT
        assert 1 <= plan.chunks <= tokens * (1 if vector else top_k)
        if vector:
            assert -(-tokens // plan.chunks) * top_k <= MAX_CHUNK_ITEMS
            fewer = max(plan.chunks - 1, 1)
            assert plan.chunks <= SMS or -(-tokens // fewer) * top_k > MAX_CHUNK_ITEMS
            assert -(-tokens // plan.chunks) * (row_bytes // vector) < plan.parts << 31
            assert plan.parts == 1 or not spec.bulk
        if spec.bulk:
            assert vector == 16 and spec.ring_bytes >= 16 * 1024
            if spec.capacity <= 128:  # A counting CTA fits the SM beside it.
                count = CountSpec(spec.capacity, "int64", 256)
                assert spec.smem_bytes + count.smem_bytes + 2 * 1024 <= 228 * 1024
        # A CTA that counts everything itself must not have much to count.
        assert spec.alone == (tokens * top_k <= (4096 if vector else 8192))


def test_a_raw_write_counts_as_a_change_in_place() -> None:
    """Autograd must not use a tensor that a kernel, behind torch's back, has overwritten."""

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        out.detach().numpy()[:] = x.numpy()

    copy = register("test_raw_copy(Tensor x, Tensor(a!) out) -> ()", run, lambda x, out: None)
    x, out, weight = torch.ones(3), torch.zeros(3), torch.ones(3, requires_grad=True)
    product = (weight * out).sum()
    copy(x, out)
    assert torch.equal(out, x) and x._version == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        fresh = torch.zeros(3)
        copy(x, fresh)
        assert torch.equal(fresh, x)


def test_register_gives_an_operator_for_both_kinds_of_tensors() -> None:
    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        if x.shape != out.shape:
            raise ValueError("out: expected the shape of x")
        out.copy_(2 * x)

    twice = register("test_twice(Tensor x, Tensor(a!) out) -> ()", run, lambda x, out: None)
    x = torch.randn(3, requires_grad=True)
    out = torch.empty(3)
    twice(x, out)
    assert torch.equal(out, 2 * x) and not out.requires_grad
    with pytest.raises(ValueError, match="out: expected the shape of x"):
        twice(x, torch.empty(2))
    assert set(torch.library.opcheck(twice, (x.detach(), out)).values()) == {"SUCCESS"}
