"""argmin and argmax. MB: the input, read once. floor: a kernel that reads it in pieces of 16 KB and
does no more. torch_amin finds the value only. Every launch has an output of its own, and the inputs
take turns, so that many times the L2 cache lies between two uses of the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import protocol as p
import tool
import torch
from contest import Advance, Contestant, Options, each, rows, take_turns
from floor import stream_contestant

import cute_moe

LEAST_LAUNCHES = 2
POISON = -7
BF16, FP32 = torch.bfloat16, torch.float32

Call = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One shape; `largest`: argmax; `compiled`: torch.compile takes part (it takes long)."""

    name: str
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    largest: bool = False
    quick: bool = False
    compiled: bool = False


CASES = (
    Case("argmin [128, 4096, 4095] fp32, dim 1", (128, 4096, 4095), 1, FP32, False, True, True),
    Case("argmin [128, 4096, 4095] bf16, dim 1", (128, 4096, 4095), 1, BF16),
    Case("argmin [524288, 4095] fp32, dim 0", (524288, 4095), 0, FP32),
    Case("argmin [128, 4096, 4095] fp32, dim 2", (128, 4096, 4095), 2, FP32),
    Case("argmin [1073741824] fp32, dim 0", (1 << 30,), 0, FP32),
    Case("argmax [4, 102400] bf16, dim 1", (4, 102400), 1, BF16, True, True),
    Case("argmax [64, 152064] bf16, dim 1", (64, 152064), 1, BF16, True),
)


def contestant(call: Call, inputs: Sequence[torch.Tensor], want: Sequence, dim: int) -> Contestant:
    """`call` on every input; afterwards the results must be `want`."""
    results: list = [None] * len(inputs)

    def launch(i: int) -> Callable[[], None]:
        def run() -> None:
            results[i] = call(inputs[i], dim)

        return run

    def poison() -> None:
        for result in results:
            result.fill_(POISON)

    def check() -> str:
        wrong = sum(not torch.equal(*pair) for pair in zip(results, want, strict=True))
        return f"{wrong} of {len(want)} wrong" if wrong else p.OK

    return Contestant([launch(i) for i in range(len(inputs))], poison, check)


def make_contestants(
    case: Case, inputs: Sequence[torch.Tensor], options: Options
) -> dict[str, Contestant]:
    """Ourselves, the wanted peers and the floor; the first result of torch is what is right."""
    ours = cute_moe.argmax if case.largest else cute_moe.argmin
    theirs = torch.argmax if case.largest else torch.argmin
    values = torch.amax if case.largest else torch.amin
    want = [theirs(x, case.dim) for x in inputs]
    made = {"cute_moe": contestant(ours, inputs, want, case.dim)}
    if options.wants("torch"):
        made["torch"] = contestant(theirs, inputs, want, case.dim)
        extremes = [values(x, case.dim) for x in inputs]
        made["torch_amin"] = contestant(values, inputs, extremes, case.dim)
    if case.compiled and options.wants("torch_compile"):
        compiled = torch.compile(theirs)
        made["torch_compile"] = contestant(compiled, inputs, want, case.dim)
    grid = tool.facts().sm_count
    return {**made, "floor": stream_contestant(inputs, grid)}


def measure(options: Options, advance: Advance) -> list[p.Row]:
    """All rows of all cases."""
    torch.manual_seed(0)
    l2 = tool.facts().l2_bytes
    measured = []
    for case in each(CASES, options, advance):
        first = torch.randn(case.shape, device="cuda", dtype=case.dtype)
        count = p.COLD_FACTOR * l2 // first.nbytes + 2
        others = [torch.randn_like(first) for _ in range(count - 1)] if count > 2 else []
        inputs = [first, *others] if others else [first] * LEAST_LAUNCHES
        reuse = first.nbytes * max(len(others), 1)
        fields = dict(op="argmin", tokens=None, case=case.name, routing="none", experts=0.0)
        fields |= dict(cache="cold", bytes=first.nbytes, reuse_bytes=reuse)
        contestants = make_contestants(case, inputs, options)
        measured += rows(take_turns(contestants, options.replays), **fields)
    return measured
