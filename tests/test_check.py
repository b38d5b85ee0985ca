"""The tensor contract: what passes, and the exact text of what does not."""

import re

import pytest
import torch

from cute_moe.host.check import Contract, TensorRule, sized_dtypes

CPU = torch.device("cpu")
CONTRACT = Contract(
    [
        TensorRule("activations", (torch.bfloat16,), ("M", 256)),
        TensorRule("logits", (torch.bfloat16, torch.float32), ("M", 32)),
        TensorRule("weights", (torch.float8_e4m3fn,), (4, 128, 256)),
    ],
    sizes={"M": (0, 8)},
)


def good(m: int = 4) -> list[torch.Tensor]:
    return [
        torch.zeros(m, 256, dtype=torch.bfloat16),
        torch.zeros(m, 32),
        torch.zeros(4, 128, 256, dtype=torch.float8_e4m3fn),
    ]


def error_of(tensors: list, device: torch.device | None = None, kind: type = ValueError) -> str:
    with pytest.raises(kind) as caught:
        CONTRACT.check(tensors, device)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize("m", [0, 1, 4, 8])
def test_right_arguments_give_the_symbols(m: int) -> None:
    assert CONTRACT.check(good(m)) == {"M": m}
    assert CONTRACT.check(tuple(good(m)), CPU) == {"M": m}


def test_both_dtypes_and_parameters_pass() -> None:
    x, logits, weights = good()
    parameter = torch.nn.Parameter(weights, requires_grad=False)
    assert CONTRACT.check([x, logits.bfloat16(), parameter]) == {"M": 4}


def test_strides_of_size_one_dims_do_not_matter() -> None:
    x, logits, weights = good(1)
    x = torch.zeros(4, 256, dtype=torch.bfloat16)[::4]
    assert x.shape == (1, 256)
    assert CONTRACT.check([x, logits, weights]) == {"M": 1}


def test_empty_tensors_may_have_any_address() -> None:
    _, logits, weights = good(0)
    x = torch.zeros(257, dtype=torch.bfloat16)[1:1].view(0, 256)
    assert CONTRACT.check([x, logits, weights]) == {"M": 0}


def test_wrong_dtype() -> None:
    x, logits, weights = good()
    assert error_of([x.float(), logits, weights]) == (
        "activations: expected [M, 256] bfloat16, contiguous, 16-byte aligned, on cpu, "
        "0 <= M <= 8; got [4, 256] float32, on cpu"
    )
    assert "expected [M, 32] bfloat16 or float32" in error_of([x, logits.half(), weights])


def test_wrong_shape_and_rank() -> None:
    x, logits, weights = good()
    assert "got [4, 255] bfloat16" in error_of([x[:, :255].contiguous(), logits, weights])
    assert "got [1024] bfloat16" in error_of([x.view(-1), logits, weights])
    assert "got [4, 256, 128]" in error_of([x, logits, weights.view(4, 256, 128)])


def test_symbol_must_agree_and_names_its_source() -> None:
    x, _, weights = good()
    assert error_of([x, torch.zeros(3, 32), weights]) == (
        "logits: expected [M, 32] bfloat16 or float32, contiguous, 16-byte aligned, on cpu, "
        "M = 4 as in activations; got [3, 32] float32, on cpu"
    )


def test_symbol_out_of_bounds() -> None:
    text = error_of(good(9))
    assert text.startswith("activations: ") and "0 <= M <= 8; got [9, 256]" in text


def test_wrong_device() -> None:
    x, logits, weights = good()
    assert "on cpu, M = 4 as in activations; got [4, 32] float32, on meta" in error_of(
        [x, logits.to("meta"), weights]
    )
    text = error_of([x, logits, weights], torch.device("cuda", 0))
    assert text.startswith("activations: ") and "on cuda:0" in text and text.endswith("on cpu")


def test_strided_and_misaligned() -> None:
    x, logits, weights = good()
    wide = torch.zeros(4, 512, dtype=torch.bfloat16)
    assert error_of([wide[:, ::2], logits, weights]).endswith("strides [512, 2], on cpu")
    shifted = torch.zeros(4 * 256 + 1, dtype=torch.bfloat16)[1:].view(4, 256)
    assert error_of([shifted, logits, weights]).endswith(
        "got [4, 256] bfloat16, address 2 bytes past 16-byte alignment, on cpu; "
        "its .clone() is aligned"
    )


def test_sparse_is_a_value_error() -> None:
    x, logits, weights = good()
    assert "layout sparse_coo" in error_of([x, logits.to_sparse(), weights])


@pytest.mark.parametrize("other", [None, 3, [1.0], "x"])
def test_not_a_tensor_is_a_type_error(other: object) -> None:
    x, _, weights = good()
    text = error_of([x, other, weights], kind=TypeError)
    assert text == f"logits: expected a torch.Tensor, got {type(other).__name__}"


def test_wrong_number_of_tensors() -> None:
    text = error_of(good()[:2])
    assert text == "expected 3 tensors (activations, logits, weights), got 2"


def test_symbols_without_bounds_and_repeated_in_one_shape() -> None:
    square = Contract([TensorRule("a", (torch.float32,), ("N", "N"))])
    assert square.check([torch.zeros(3, 3)]) == {"N": 3}
    with pytest.raises(ValueError, match=r"a: expected \[N, N\] float32"):
        square.check([torch.zeros(3, 4)])


ROWS = Contract(
    [
        TensorRule("rows", sized_dtypes(2), ("R", "H"), align=1, strides="rows", words="2 bytes"),
        TensorRule("any", (torch.int32,), None, align=1, strides="any"),
        TensorRule("out", "rows", ("R", "H"), align=1),
    ]
)


def test_other_strides_shapes_and_dtypes() -> None:
    wide, anything = torch.zeros(4, 9, dtype=torch.half), torch.zeros(3, 2, 2, dtype=torch.int32)
    out = torch.zeros(4, 3, dtype=torch.half)
    for other in (anything, anything.mT, anything[0, 0, 0], anything.expand(2, 3, 2, 2)):
        assert ROWS.check([wide[:, 1:4], other, out]) == {"R": 4, "H": 3}
    assert ROWS.check([wide[:, ::9], anything, out[:, :1].contiguous()]) == {"R": 4, "H": 1}
    for flawed, text in [
        ([wide.float(), anything, out], "rows: expected [R, H] 2 bytes, rows of adjacent elements"),
        ([wide[:, ::3], anything, out], "got [4, 3] float16, strides [9, 3], on cpu"),
        ([wide[0], anything, out], "got [9] float16"),
        ([wide[:, :3], anything.long(), out], "any: expected int32, on cpu; got [3, 2, 2] int64"),
        ([wide[:, :3], anything.to_sparse(), out], "any: expected int32, on cpu; got [3, 2, 2] i"),
        ([wide[:, :3], anything, out.bfloat16()], "out: expected [R, H] float16 as rows, contig"),
        ([wide[:, :3], anything, wide[:, :3]], "got [4, 3] float16, strides [9, 1], on cpu"),
    ]:
        for fake in (False, True):
            with pytest.raises(ValueError, match=re.escape(text)):
                ROWS.check(flawed, fake=fake)


def test_sized_dtypes() -> None:
    found = sized_dtypes(1, 2)
    assert {torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int16} <= set(found)
    assert {d.itemsize for d in found} == {1, 2} and len(set(found)) == len(found)


def test_contract_needs_rules() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Contract([])
