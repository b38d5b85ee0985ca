"""Dispatch, sort, permute and combine. MB: bytes read and written, each once. copy: copy_ that
reads and writes as many bytes. torch: index_copy_ for dispatch, torch_select: index_select with the
order known; sort, searchsorted and index_select for the others. Cold cases move many times the L2
cache in every launch; warm ones find their one input in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import protocol as p
import tool
import torch
from contest import Advance, Contestant, Options, each, rows, take_turns

import cute_moe
from cute_moe import dispatch_reference as reference

WARM_LAUNCHES, COLD_BYTES = 50, 8 << 30  # launches of a graph, or bytes that they move together
DEVICE = "cuda"
POISON = 0xA5
BF16, FP32 = torch.bfloat16, torch.float32
BF16_ERROR = 2.0**-7  # relative, where sums are rounded at other places

Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], torch.Tensor | Tensors]


@dataclass(frozen=True)
class Entries:
    """What takes part in a case: calls by name, the right results, bytes that a call must move."""

    calls: dict[str, Call]
    want: Tensors
    nbytes: int
    tolerance: float = 0.0


@dataclass(frozen=True)
class Case:
    """A line of the table."""

    name: str
    make: Callable[[Options], Entries]
    quick: bool = False


def contestant(call: Call, want: Tensors, launches: int, tolerance: float) -> Contestant:
    """One call again and again; its last results must be `want`, to the bit without a tolerance."""
    last: list[torch.Tensor] = []

    def launch() -> None:
        result = call()
        last[:] = result if isinstance(result, tuple) else (result,)

    def good(result: torch.Tensor, wanted: torch.Tensor) -> bool:
        if tolerance:
            return torch.allclose(result.float(), wanted.float(), rtol=tolerance, atol=tolerance)
        same_kind = result.shape == wanted.shape and result.dtype == wanted.dtype
        return same_kind and torch.equal(result.view(torch.uint8), wanted.view(torch.uint8))

    def check() -> str:
        right = len(last) == len(want) and all(map(good, last, want))
        return p.OK if right else "wrong result"

    def poison() -> None:
        for result in last:
            result.view(torch.uint8).fill_(POISON)

    return Contestant([launch] * launches, poison, check)


def copy_contestant(nbytes: int, launches: int) -> Contestant:
    """A copy that reads and writes `nbytes` together."""
    source = torch.randint(256, (nbytes // 2,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return contestant(lambda: target.copy_(source), (source,), launches, 0.0)


def dispatch_case(tokens: int, hidden: int, dtype: torch.dtype, experts: int, mixed: bool):
    """Tokens go to the experts in turn or, if `mixed`, at random; slots are in token order."""

    def make(options: Options) -> Entries:
        x = torch.randn(tokens, hidden, dtype=dtype, device=DEVICE)
        expert = torch.arange(tokens, device=DEVICE, dtype=torch.int32) % experts
        if mixed:
            expert = expert[torch.randperm(tokens, device=DEVICE)].contiguous()
        slots, offsets, order = reference.dispatch_indices(expert[:, None], experts)
        slot, order = slots.view(-1), order.long()
        target = reference.rows_of(expert, slot, offsets, tokens)[0]
        ours, theirs, selected, compiled = (torch.empty_like(x) for _ in range(4))
        calls = {"cute_moe": lambda: cute_moe.dispatch(x, expert, slot, offsets, out=ours)}
        if options.wants("torch"):
            calls["torch"] = lambda: theirs.index_copy_(0, target, x)
            calls["torch_select"] = lambda: torch.index_select(x, 0, order, out=selected)
        if options.wants("torch_compile"):
            scatter = torch.compile(lambda out, rows, x: out.index_copy_(0, rows, x))
            calls["torch_compile"] = lambda: scatter(compiled, target, x)
        return Entries(calls, (x[order],), 2 * x.nbytes)

    return make


def topk_ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Distinct experts for every token, int64 [tokens, top_k]."""
    return torch.rand(tokens, experts, device=DEVICE).topk(top_k, dim=1).indices


def torch_sort(ids: torch.Tensor, experts: int) -> Tensors:
    """What moe_dispatch_indices gives, in operations that a graph can capture."""
    flat = ids.view(-1)
    ordered, order = flat.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(experts + 1, device=ids.device))
    numbers = torch.arange(len(order), device=ids.device)
    row = torch.empty_like(order).scatter_(0, order, numbers)
    slots = (row - ends[flat]).int().view(ids.shape)
    return slots, ends.int(), (order // ids.shape[1]).int()


def indices_case(tokens: int, top_k: int, experts: int):
    """The sort alone."""

    def make(options: Options) -> Entries:
        ids = topk_ids(tokens, top_k, experts)
        want = reference.dispatch_indices(ids, experts)
        calls = {"cute_moe": lambda: cute_moe.moe_dispatch_indices(ids, experts)}
        if options.wants("torch"):
            calls["torch"] = lambda: torch_sort(ids, experts)
        slots, _, row_token = want
        return Entries(calls, want, ids.nbytes + slots.nbytes + row_token.nbytes)

    return make


def permute_case(tokens: int, top_k: int, experts: int, hidden: int):
    """Sort and copies, bf16."""

    def make(options: Options) -> Entries:
        ids = topk_ids(tokens, top_k, experts)
        x = torch.randn(tokens, hidden, dtype=BF16, device=DEVICE)
        indices = reference.dispatch_indices(ids, experts)
        packed = x[indices[2].long()]
        ours, theirs = torch.empty_like(packed), torch.empty_like(packed)

        def by_torch() -> Tensors:
            slots, ends, row_token = torch_sort(ids, experts)
            return torch.index_select(x, 0, row_token, out=theirs), slots, ends, row_token

        calls = {"cute_moe": lambda: cute_moe.moe_permute(x, ids, experts, out=ours)}
        if options.wants("torch"):
            calls["torch"] = by_torch
        return Entries(calls, (packed, *indices), x.nbytes + packed.nbytes)

    return make


def combine_case(tokens: int, top_k: int, experts: int, hidden: int):
    """The weighted sum, bf16 rows and fp32 weights."""

    def make(options: Options) -> Entries:
        ids = topk_ids(tokens, top_k, experts)
        slots, offsets, _ = reference.dispatch_indices(ids, experts)
        row = reference.rows_of(ids, slots, offsets, tokens * top_k)[0]
        packed = torch.randn(tokens * top_k, hidden, dtype=BF16, device=DEVICE)
        weights = torch.rand(tokens, top_k, device=DEVICE)
        want = reference.combine(packed, ids, slots, offsets, weights)
        out = torch.empty_like(want)
        arguments = (packed, ids, slots, offsets, weights)
        calls = {"cute_moe": lambda: cute_moe.combine(*arguments, out=out)}

        def theirs() -> torch.Tensor:
            return (packed[row] * weights[..., None]).sum(1).to(BF16)

        if options.wants("torch"):
            calls["torch"] = theirs
        if options.wants("torch_compile"):
            calls["torch_compile"] = torch.compile(theirs)
        return Entries(calls, (want,), packed.nbytes + want.nbytes, BF16_ERROR)

    return make


CASES = (
    Case("dispatch 2048 x 128 fp32, 16 experts in turn", dispatch_case(2048, 128, FP32, 16, False),
         quick=True),
    Case("dispatch 131072 x 7168 bf16, 16 experts in turn",
         dispatch_case(131072, 7168, BF16, 16, False)),
    Case("dispatch 131072 x 7168 bf16, 128 experts mixed",
         dispatch_case(131072, 7168, BF16, 128, True)),
    Case("indices 32 x 8, 128 experts", indices_case(32, 8, 128)),
    Case("indices 4096 x 8, 128 experts", indices_case(4096, 8, 128)),
    Case("indices 131072 x 8, 128 experts", indices_case(131072, 8, 128)),
    Case("permute 32 x 7168 bf16, top 8 of 128", permute_case(32, 8, 128, 7168), quick=True),
    Case("permute 4096 x 7168 bf16, top 8 of 128", permute_case(4096, 8, 128, 7168)),
    Case("combine 32 x 7168 bf16, top 8 of 128", combine_case(32, 8, 128, 7168)),
    Case("combine 4096 x 7168 bf16, top 8 of 128", combine_case(4096, 8, 128, 7168)),
)  # fmt: skip


def measure(options: Options, advance: Advance) -> list[p.Row]:
    """All rows of all cases."""
    torch.manual_seed(0)
    l2 = tool.facts().l2_bytes
    measured = []
    for case in each(CASES, options, advance):
        entries = case.make(options)
        cold = entries.nbytes > p.COLD_FACTOR * l2
        launches = max(1, COLD_BYTES // entries.nbytes) if cold else WARM_LAUNCHES
        contestants = {
            name: contestant(call, entries.want, launches, entries.tolerance)
            for name, call in entries.calls.items()
        }
        if options.wants("copy"):
            contestants["copy"] = copy_contestant(entries.nbytes, launches)
        fields = dict(op="dispatch", tokens=None, case=case.name, routing="none", experts=0.0)
        fields |= dict(cache="cold" if cold else "warm", bytes=entries.nbytes)
        fields |= dict(reuse_bytes=entries.nbytes if cold else 0)
        measured += rows(take_turns(contestants, options.replays), **fields)
    return measured
