"""Dispatch, sort, permute and combine without a GPU: reference, errors, operators, compile."""

import contextlib
import re

import pytest
import torch
from dispatch_cases import DTYPES, ROUTINGS, Guarded, bytes_as, draw_pairs, same_bytes
from torch._subclasses import FakeTensorMode

import cute_moe
from cute_moe import dispatch_ops as ops
from cute_moe import dispatch_reference as reference

CPU = torch.device("cpu")


def pairs(tokens: int = 5, experts: int = 3):
    """A hidden state and valid pairs for it."""
    return torch.randn(tokens, 4), *draw_pairs("random", tokens, experts, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_dispatch_moves_bytes(kind: str, dtype: torch.dtype) -> None:
    x, (expert, slot, offsets) = bytes_as((40, 7), dtype, CPU), draw_pairs(kind, 40, 9, CPU)
    got = cute_moe.dispatch(x, expert.int(), slot, offsets.int())
    assert got.shape == (40, 7)
    for t in range(40):
        row = int(offsets[expert[t]] + slot[t])
        assert same_bytes(got[row : row + 1], x[t : t + 1])


def test_dispatch_zeroes_the_rest_and_drops_what_is_out_of_range() -> None:
    x = torch.ones(7, 2)
    expert = torch.tensor([0, 1, -1, 2, 0, 1, 1])
    slot = torch.tensor([0, 1, 0, 0, 5, -1, 2])
    offsets = torch.tensor([0, 2, 5])
    got = cute_moe.dispatch(x, expert, slot, offsets, num_rows=6)
    assert got[:, 0].tolist() == [1, 0, 0, 1, 1, 0]
    got = cute_moe.dispatch(x, expert, slot, offsets, num_rows=4)
    assert got[:, 0].tolist() == [1, 0, 0, 1]
    hostile = torch.full((7,), 2**63 - 1)
    got = cute_moe.dispatch(x, expert, hostile, torch.tensor([5, 2**63 - 1, -3]), num_rows=6)
    assert not got.any()


def test_dispatch_into_out_and_from_strided_rows() -> None:
    x, expert, slot, offsets = pairs()
    wide = torch.randn(5, 9)
    wide[:, 2:6] = x
    out = torch.full((8, 4), torch.nan)
    got = cute_moe.dispatch(wide[:, 2:6], expert, slot, offsets, out=out)
    assert got is out
    assert torch.equal(out, cute_moe.dispatch(x, expert, slot, offsets, num_rows=8))
    column = wide[:, 3:4]
    got = cute_moe.dispatch(column, expert, slot, offsets)
    assert torch.equal(got, cute_moe.dispatch(column.contiguous(), expert, slot, offsets))


@pytest.mark.parametrize("tokens, top_k, experts", [(0, 2, 3), (1, 1, 1), (30, 4, 5), (9, 0, 2)])
def test_indices_are_a_stable_sort(tokens: int, top_k: int, experts: int) -> None:
    ids = torch.randint(-1, experts + 1, (tokens, top_k), dtype=torch.int32)
    slots, offsets, row_token = cute_moe.moe_dispatch_indices(ids, experts)
    assert {t.dtype for t in (slots, offsets, row_token)} == {torch.int32}
    rows = []
    for expert in range(experts):
        found = [(t, j) for t in range(tokens) for j in range(top_k) if ids[t, j] == expert]
        assert [int(slots[at]) for at in found] == list(range(len(found)))
        assert int(offsets[expert]) == len(rows)
        rows += [t for t, _ in found]
    assert int(offsets[experts]) == len(rows)
    assert row_token.tolist() == rows + [-1] * (tokens * top_k - len(rows))
    assert (slots == -1).sum() == tokens * top_k - len(rows)


def test_permute_then_combine_is_a_weighted_sum() -> None:
    hidden, ids = torch.randn(20, 6), torch.randint(0, 5, (20, 3))
    packed, slots, offsets, row_token = cute_moe.moe_permute(hidden, ids, 5)
    assert torch.equal(packed, hidden[row_token.long()])
    weights = torch.rand(20, 3)
    got = cute_moe.combine(packed * 2, ids, slots, offsets, weights)
    torch.testing.assert_close(got, 2 * hidden * weights.sum(1, keepdim=True))


def test_dropped_ids_give_zero_rows_and_no_terms() -> None:
    hidden, ids = torch.randn(4, 3), torch.tensor([[0, 7], [1, 0], [-1, -1], [1, 1]])
    packed, slots, offsets, row_token = cute_moe.moe_permute(hidden, ids, 2)
    assert row_token.tolist() == [0, 1, 1, 3, 3, -1, -1, -1]
    assert not packed[5:].any()
    got = cute_moe.combine(packed.fill_(torch.inf), ids, slots, offsets, torch.ones(4, 2))
    assert got[:, 0].tolist() == [torch.inf, torch.inf, 0, torch.inf]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
def test_combine_sums_in_fp32_or_fp64(dtype: torch.dtype) -> None:
    top = 300.0 if dtype.itemsize == 1 else 1 / 3
    packed = torch.full((2, 5), top, dtype=torch.float64).to(dtype)
    ids, slots = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, 0]])
    got = cute_moe.combine(packed, ids, slots, torch.tensor([0, 2]), torch.full((1, 2), 2.0))
    want = 4 * packed[:1].double()
    limit = torch.finfo(dtype).max
    assert torch.equal(got.double(), want.clamp(-limit, limit))


def test_validate_names_the_first_offender() -> None:
    x, offsets = torch.randn(3, 4), torch.tensor([0, 2, 4])
    zero, one = torch.zeros(3, dtype=torch.int64), torch.arange(3)

    def check(text: str, expert: list[int], slot: list[int], **options) -> None:
        with pytest.raises(ValueError, match=re.escape(text)):
            expert_slot = (torch.tensor(expert), torch.tensor(slot))
            cute_moe.dispatch(x, *expert_slot, offsets, validate=True, **options)

    check("expert_idx: expected 0..1, got 2 at [1]", [0, 2, -1], [0, 0, 9])
    check("slot_idx: expected 0..1 for expert 1, got 2 at [2]", [0, 1, 1], [0, 0, 2])
    check("slot_idx: expected 0..1 for expert 0, got -1 at [0]", [0, 1, 1], [-1, 0, 2])
    check("expected rows 0..2, got row 3 for expert 1, slot 1 at [1]", [0, 1, 1], [0, 1, 0],
          num_rows=3)  # fmt: skip
    good = cute_moe.dispatch(x, zero + 1, one // 2, offsets, validate=True)
    assert good.shape == (4, 4)
    ids = torch.tensor([[0, 1], [1, 4], [9, 0]])
    for call in (
        cute_moe.moe_dispatch_indices,
        lambda i, e, **o: cute_moe.moe_permute(x, i, e, **o),
    ):
        with pytest.raises(ValueError, match=r"topk_ids: expected 0..3, got 4 at \[1, 1\]"):
            call(ids, 4, validate=True)
    with pytest.raises(
        ValueError, match=r"slot_idx: expected 0..1 for expert 0, got 2 at \[2, 0\]"
    ):
        ids, slots = torch.zeros(3, 1, dtype=torch.int64), one[:, None]
        cute_moe.combine(x, ids, slots, offsets, torch.ones(3, 1), validate=True)


@pytest.mark.parametrize("validate", [1, 0, None, "no"])
def test_validate_is_a_bool(validate) -> None:
    x, expert, slot, offsets = pairs()
    ids, weights = expert[:, None], torch.ones(5, 1)
    for call in (
        lambda: cute_moe.dispatch(x, expert, slot, offsets, validate=validate),
        lambda: cute_moe.moe_dispatch_indices(ids, 3, validate=validate),
        lambda: cute_moe.moe_permute(x, ids, 3, validate=validate),
        lambda: cute_moe.combine(x, ids, slot[:, None], offsets, weights, validate=validate),
    ):
        with pytest.raises(TypeError, match="^validate: expected a bool, got "):
            call()


def rejected(text: str, call, out: Guarded, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()
    assert out.untouched()


def test_dispatch_rejects() -> None:
    x, expert, slot, offsets = pairs()
    out = Guarded((5, 4), torch.float32, CPU)

    def check(text: str, *arguments, error: type[Exception] = ValueError, **options) -> None:
        options = {"out": out.matrix, **options}
        rejected(text, lambda: cute_moe.dispatch(*arguments, **options), out, error)

    check("token_hidden: expected a torch.Tensor, got list", [1], expert, slot, offsets,
          error=TypeError)  # fmt: skip
    check("token_hidden: expected 2 dimensions, got shape [4]", x[0], expert, slot, offsets)
    check("token_hidden: expected a dense tensor, got layout torch.sparse_coo", x.to_sparse(),
          expert, slot, offsets)  # fmt: skip
    text = (
        "token_hidden: expected [T, H] any dtype of 1, 2, 4 or 8 bytes, rows of adjacent elements"
    )
    check(text, x.to(torch.complex128), expert, slot, offsets)
    check(text, torch.randn(4, 5).T, expert, slot, offsets)
    check("1 <= H <= 1073741824; got [5, 0] float32, on cpu", x[:, :0], expert, slot, offsets)
    check("expert_idx: expected [T] int32 or int64", x, expert.short(), slot, offsets)
    check("on cpu, T = 5 as in token_hidden; got [4] int64", x, expert[:4], slot[:4], offsets)
    check("slot_idx: expected [T] int32 or int64", x, expert, slot[:4], offsets)
    check("expert_offsets: expected [E+1]", x, expert, slot, offsets[:1])
    check("out: expected 7 rows as num_rows says, got 5", x, expert, slot, offsets, num_rows=7)
    check("num_rows: expected an int, got float", x, expert, slot, offsets, num_rows=5.0, out=None,
          error=TypeError)  # fmt: skip
    check("num_rows: expected an int, got float", x, expert, slot, offsets, num_rows=5.0,
          error=TypeError)  # fmt: skip
    for rows in (-1, 1 << 31):
        text = f"expected 0..1073741824, got {rows}"
        check(f"num_rows: {text}", x, expert, slot, offsets, num_rows=rows, out=None)
        check(f"expert_offsets[-1]: {text}", x, expert, slot, offsets * 0 + rows, out=None)
    text = "out: expected [R, H] float32 as token_hidden, contiguous, on cpu, 0 <= R <= 1073741824"
    check(f"{text}, H = 4 as in token_hidden; got [5, 4] float32, strides [1, 5], on cpu", x,
          expert, slot, offsets, out=torch.empty(4, 5).T)  # fmt: skip
    check(text, x, expert, slot, offsets, out=torch.empty(5, 3))
    check(text, x, expert, slot, offsets, out=x.double())
    check("got an overlap with token_hidden", x, expert, slot, offsets, out=x)
    check("out: expected 2 dimensions, got shape []", x, expert, slot, offsets, out=x[0, 0])
    for options in ({}, {"num_rows": 5}, {"validate": True}):
        check("out: expected a torch.Tensor, got list", x, expert, slot, offsets, out=[1],
              error=TypeError, **options)  # fmt: skip
        for i, name in enumerate(("expert_idx", "slot_idx", "expert_offsets"), start=1):
            arguments = [x, expert, slot, offsets]
            arguments[i] = [0]
            for target in (None, out.matrix):
                check(f"{name}: expected a torch.Tensor, got list", *arguments, out=target,
                      error=TypeError, **options)  # fmt: skip
    shared = torch.zeros(10, dtype=torch.int64)
    check("got an overlap with slot_idx", x, expert, shared[5:], offsets,
          out=shared.view(torch.float32).view(5, 4))  # fmt: skip


def test_sort_rejects() -> None:
    hidden, ids = torch.randn(5, 4), torch.zeros(5, 2, dtype=torch.int64)
    out = Guarded((10, 4), torch.float32, CPU)

    def check(text: str, *arguments, error: type[Exception] = ValueError, **options) -> None:
        options = {"out": out.matrix, **options}
        rejected(text, lambda: cute_moe.moe_permute(*arguments, **options), out, error)

    check("topk_ids: expected [T, k] int32 or int64", hidden, ids.float(), 3)
    check("topk_ids: expected 2 dimensions", hidden, ids[0], 3)
    check("num_experts: expected 1..4096, got 0", hidden, ids, 0)
    check("num_experts: expected 1..4096, got 4097", hidden, ids, 4097)
    check("T = 5 as in hidden, 0 <= k <= 2048; got [4, 2] int64", hidden, ids[:4], 3)
    check("out: expected 10 rows, T * k of topk_ids, got [9, 4]", hidden, ids, 3,
          out=torch.empty(9, 4))  # fmt: skip
    check("out: expected a torch.Tensor, got list", hidden, ids, 3, out=[1], error=TypeError)
    check("out: expected 2 dimensions, got shape []", hidden, ids, 3, out=hidden[0, 0])
    check(
        "0 <= k <= 2048; got [1, 2049] int64",
        hidden[:1],
        torch.zeros(1, 2049, dtype=torch.int64),
        3,
    )
    many = torch.empty(1 << 23, 3, dtype=torch.int32)
    check("topk_ids: expected T * k <= 16777216, got [8388608, 3]", hidden, many, 3, out=None)
    with pytest.raises(ValueError, match=re.escape("topk_ids: expected T * k <= 16777216")):
        cute_moe.moe_dispatch_indices(many, 3)
    with pytest.raises(ValueError, match="num_experts: expected 1..4096, got 0"):
        cute_moe.moe_dispatch_indices(ids, 0)
    with pytest.raises(TypeError, match="num_experts: expected an int, got bool"):
        cute_moe.moe_dispatch_indices(ids, True)


def test_combine_rejects() -> None:
    packed, ids = torch.randn(6, 4), torch.zeros(3, 2, dtype=torch.int64)
    offsets, weights = torch.tensor([0, 6]), torch.ones(3, 2)
    out = Guarded((3, 4), torch.float32, CPU)

    def check(text: str, *arguments, error: type[Exception] = ValueError, **options) -> None:
        options = {"out": out.matrix, **options}
        rejected(text, lambda: cute_moe.combine(*arguments, **options), out, error)

    check(
        "packed: expected [R, H] bfloat16 or float16 or", packed.int(), ids, ids, offsets, weights
    )
    check("expert_idx: expected 2 dimensions", packed, ids[0], ids, offsets, weights)
    check("slot_idx: expected [T, k]", packed, ids, ids[:, :1].contiguous(), offsets, weights)
    check("topk_weights: expected [T, k] float32", packed, ids, ids, offsets, weights.double())
    check(
        "out: expected [T, H] float32 as packed",
        packed,
        ids,
        ids,
        offsets,
        weights,
        out=torch.empty(2, 4),
    )
    for i, name in enumerate(("slot_idx", "expert_offsets", "topk_weights"), start=2):
        arguments = [packed, ids, ids, offsets, weights]
        arguments[i] = [0]
        for target in (None, out.matrix):
            check(f"{name}: expected a torch.Tensor, got list", *arguments, out=target,
                  error=TypeError)  # fmt: skip
    check("out: expected a torch.Tensor, got list", packed, ids, ids, offsets, weights, out=[1],
          error=TypeError)  # fmt: skip
    check("out: expected 2 dimensions, got shape []", packed, ids, ids, offsets, weights,
          out=packed[0, 0])  # fmt: skip
    check("got an overlap with packed", packed, ids, ids, offsets, weights, out=packed[:3])


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


# Texts of errors, and calls that raise them with fake and with real tensors.
FLAWED = {
    "expert_idx: expected [T] int32 or int64, contiguous, 4-byte aligned, on cpu, T = 5":
        lambda x: cute_moe.dispatch(x, ints(4), ints(4), ints(3), num_rows=5),
    "slot_idx: expected [T] int32 or int64, contiguous, 4-byte aligned, on cpu, T = 5":
        lambda x: cute_moe.dispatch(x, ints(5), ints(4), ints(3), num_rows=5),
    "out: expected [R, H] float32 as token_hidden, contiguous, on cpu":
        lambda x: cute_moe.dispatch(x, ints(5), ints(5), ints(3), out=x.double()),
    "token_hidden: expected [T, H] any dtype of 1, 2, 4 or 8 bytes, rows of adjacent elements":
        lambda x: cute_moe.dispatch(x.expand(1 << 31, 5, 4)[:, 0], *[ints(3)] * 3, num_rows=5),
    "out: expected [R, H] uint8 as token_hidden, contiguous, on cpu, 0 <= R <= 1073741824":
        lambda x: cute_moe.dispatch(x[:, :1].byte(), *[ints(5)] * 3,
                                    out=x.new_empty((1 << 30) + 1, 1, dtype=torch.uint8)),
    "topk_ids: expected [T, k] int32 or int64":
        lambda x: cute_moe.moe_dispatch_indices(x, 3),
    "num_experts: expected 1..4096, got 0":
        lambda x: cute_moe.moe_dispatch_indices(ints(5, 2), 0),
    "topk_ids: expected [T, k] int32 or int64, contiguous, 4-byte aligned, on cpu, T = 5 as in":
        lambda x: cute_moe.moe_permute(x, ints(6, 2), 3),
    "out: expected 10 rows, T * k of topk_ids, got [5, 4]":
        lambda x: cute_moe.moe_permute(x, ints(5, 2), 3, out=x),
    "packed: expected [R, H] bfloat16 or float16 or":
        lambda x: cute_moe.combine(ints(6, 4), ints(3, 2), ints(3, 2), ints(2), x.new_empty(3, 2)),
    "topk_weights: expected [T, k] float32":
        lambda x: cute_moe.combine(x, ints(3, 2), ints(3, 2), ints(2), ints(3, 2)),
    "out: expected [T, H] float32 as packed":
        lambda x: cute_moe.combine(x, *[ints(3, 2)] * 2, ints(2), x.new_empty(3, 2), out=x),
}  # fmt: skip


@pytest.mark.parametrize("text", FLAWED)
def test_fakes_check_like_the_real_ones(text: str) -> None:
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode, pytest.raises(ValueError, match="^" + re.escape(text)):
            FLAWED[text](torch.empty(5, 4))


def operator_calls():
    """Every operator with arguments, in small."""
    x, expert, slot, offsets = pairs()
    ids = torch.randint(0, 4, (5, 2))
    packed, slots, ends, _ = cute_moe.moe_permute(x, ids, 4)
    return {
        "dispatch": (ops.dispatch, (x, expert, slot, offsets, torch.empty(7, 4))),
        "indices": (ops.indices, (ids, 4)),
        "permute": (ops.permute, (x, ids, 4, torch.empty(10, 4))),
        "combine": (ops.combine, (packed, ids, slots, ends, torch.rand(5, 2), torch.empty(5, 4))),
    }


@pytest.mark.parametrize("name", ["dispatch", "indices", "permute", "combine"])
def test_operators_pass_opcheck(name: str) -> None:
    operator, arguments = operator_calls()[name]
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_without_graph_breaks(dynamic: bool) -> None:
    def layer(hidden, ids, weights):
        packed, slots, offsets, _ = cute_moe.moe_permute(hidden, ids, 4)
        first = cute_moe.dispatch(
            hidden, ids[:, 0].contiguous(), slots[:, 0].contiguous(), offsets, num_rows=12
        )
        out = cute_moe.combine(packed * 2, ids, slots, offsets, weights)
        return out, first, cute_moe.moe_dispatch_indices(ids, 4)[2]

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (6, 9):
        inputs = (torch.randn(tokens, 8), torch.randint(0, 4, (tokens, 2)), torch.rand(tokens, 2))
        for got, want in zip(compiled(*inputs), layer(*inputs), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_reference_dispatch_of_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    got = reference.dispatch(torch.randn(0, 3), empty, empty, torch.tensor([0, 0]), 2)
    assert torch.equal(got, torch.zeros(2, 3))
