"""Contestants of the benchmarks with the CPU in the GPU's place: who runs, and what is checked."""

from collections import Counter
from types import SimpleNamespace

import bench_argmin
import bench_host
import bench_moe
import contest
import floor
import peers
import protocol
import pytest
import tool
import torch
from fake_cuda import fake_int32
from perf_rows import MB, FakeGraph, Streams, fake_interleave

import cute_moe
from cute_moe import reference
from cute_moe.shapes import LayerShape

SHAPE = LayerShape(num_experts=32, hidden=256, intermediate=128, top_k=8)
LAUNCHES, COPIES = 4, 2


@pytest.fixture
def no_gpu(monkeypatch) -> None:
    """Graphs that run on the CPU, and a GPU of 4 SMs."""
    Streams(monkeypatch)
    facts = SimpleNamespace(l2_bytes=60 * MB, sm_count=4)
    monkeypatch.setattr(tool, "facts", lambda: facts)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(contest, "capture", FakeGraph)
    monkeypatch.setattr(contest, "SKIPPED", {})
    monkeypatch.setattr(protocol, "interleave", fake_interleave)
    monkeypatch.setattr(protocol, "LAUNCHES", LAUNCHES)
    monkeypatch.setattr(protocol, "WARM_UP_REPLAYS", 1)


def mono_moe(*inputs: torch.Tensor, top_k, out, scratchpad, activations="fp8", programmatic=False):
    """The layer in place of the kernel."""
    layer = reference.moe_fp32 if activations == "bf16" else reference.moe_block_fp8
    return out.copy_(layer(*inputs, top_k))


@pytest.fixture
def pool(no_gpu, monkeypatch) -> bench_moe.Pool:
    monkeypatch.setattr(bench_moe, "mono_moe", mono_moe)
    torch.manual_seed(0)
    e, k, n = SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate
    sizes = ((e, 2 * n, k), (e, k, n))
    weights = [t for size in sizes for t in reference.quantize_blocks(0.05 * torch.randn(size))]
    nothing, spec = torch.empty(0), floor.FloorSpec(grid=4)
    return bench_moe.Pool([tuple(weights)] * COPIES, nothing, nothing, spec, nothing, SHAPE)


def test_references_of_a_case_are_those_of_each_launch(pool) -> None:
    case = bench_moe.make_case(pool, 3, "skewed")
    assert len(case.xs) == LAUNCHES and case.copies == COPIES
    for i in range(LAUNCHES):
        inputs = (case.xs[i], case.logits[i], *pool.copies[0], protocol.TOP_K)
        assert torch.equal(case.want[i], reference.moe_block_fp8(*inputs))
        assert reference.relative_error(case.meant[i], reference.moe_fp32(*inputs)) < 1e-5
    again = case.repeated()
    assert again.copies == 1 and all(m is case.meant[0] for m in again.meant)


def broken(*_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image")


def names_by_cache(rows: list[protocol.Row]) -> dict[str, set[str]]:
    return {c: {r.contestant for r in rows if r.cache == c} for c in {r.cache for r in rows}}


@pytest.mark.parametrize("tokens, routing", [(1, "uniform"), (3, "uniform"), (1, "same")])
def test_rows_of_the_layer(pool, monkeypatch, capsys, tokens, routing) -> None:
    fine = contest.Contestant([lambda: None] * LAUNCHES, lambda: None, lambda: protocol.OK)
    monkeypatch.setattr(bench_moe, "floor_contestant", lambda pool, lists, copies: fine)
    racing = {
        "cute_moe": bench_moe.ourselves(pool),
        "cute_moe_bf16": bench_moe.ourselves(pool, activations="bf16"),
        "flashinfer": peers.Peer(broken, pool.copies, 0.05),
        "torch": peers.plain_torch(pool.copies, SHAPE),
    }
    made = bench_moe.token_rows(pool, racing, tokens, routing, 2)
    for row in made:  # wrong outputs would go before a cache that is not cold
        assert row.check.startswith("not cold" if row.cache == "cold" else "ok")
    ours = {"cute_moe", "cute_moe_bf16"}
    torch_runs = tokens in bench_moe.BASELINE_TOKENS and routing == "uniform"
    want = {"cold": ours | {"floor"} | ({"torch"} if torch_runs else set())}
    if routing == "uniform":
        want |= {"warm": ours | {"floor"}, "eager": ours}
    assert names_by_cache(made) == want
    assert max(Counter((row.contestant, row.cache) for row in made).values()) == 1
    assert capsys.readouterr().out == "flashinfer: skipped, RuntimeError: no kernel image\n"


def test_bf16_activations_must_be_more_exact(pool) -> None:
    """Results with quantised activations do not pass as bf16 ones."""
    case = bench_moe.make_case(pool, 2, "uniform")
    peer = bench_moe.ourselves(pool, activations="bf16")
    good = bench_moe.layer_contestant(case, peer)
    quantised = peers.Peer(bench_moe.ourselves(pool).call, pool.copies, peer.max_error, True)
    bad = bench_moe.layer_contestant(case, quantised)
    for contestant in (good, bad):
        for launch in contestant.launches:
            launch()
    assert good.check() == protocol.OK and bad.check().startswith("4 of 4 wrong")


def read_chunks(spec: floor.FloorSpec):
    """The probe on the CPU, chunk by chunk."""

    def function(w_up, w_down, experts, sums) -> None:
        chunks = []
        for weights, count in ((w_up, spec.up_chunks), (w_down, spec.down_chunks)):
            for expert in experts.tolist():
                start = expert * count * floor.CHUNK_BYTES
                part = weights[start : start + count * floor.CHUNK_BYTES]
                chunks += part.view(torch.int32).view(count, -1)
        for cta in range(spec.grid):
            for lane in range(floor.LANES):
                word = lane * floor.SAMPLE_STRIDE
                total = sum(int(chunk[word]) for chunk in chunks[cta :: spec.grid])
                sums[cta * floor.LANES + lane] = (total + 2**31) % 2**32 - 2**31

    return function


def test_the_probe_on_whole_buffers(monkeypatch) -> None:
    monkeypatch.setattr(floor, "floor_function", read_chunks)
    buffers = [torch.randn(7, floor.CHUNK_BYTES // 4) for _ in range(2)]
    contestant = floor.stream_contestant(buffers, grid=4)
    contestant.poison()
    assert contestant.check() == "2 of 2 launches saw other bytes"
    contestant.launches[0]()
    assert contestant.check() == "1 of 2 launches saw other bytes"
    contestant.launches[1]()
    assert contestant.check() == protocol.OK
    buffers[1][6] += 1.0
    contestant.launches[1]()
    assert contestant.check() == "1 of 2 launches saw other bytes"


def test_the_probe_reads_every_input_of_argmin_whole() -> None:
    for case in bench_argmin.CASES:
        nbytes = torch.Size(case.shape).numel() * case.dtype.itemsize
        assert nbytes % floor.CHUNK_BYTES == 0 and nbytes >= 2 * floor.CHUNK_BYTES, case.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would read the memory")
def test_the_probe_takes_halves_of_4_gb() -> None:
    """The call gets as far as the driver that is not there."""
    chunks = 4 * 1024 * MB // floor.CHUNK_BYTES
    function = floor.floor_function(floor.FloorSpec(up_chunks=chunks, down_chunks=chunks))
    half = fake_int32([chunks * floor.CHUNK_BYTES], type_code=1, bits=8)
    with pytest.raises(RuntimeError, match="(?i)cuda.*driver"):
        function(half, half, fake_int32([1]), fake_int32([132 * floor.LANES]))


@pytest.mark.parametrize("largest", [False, True])
def test_contestants_of_argmin(no_gpu, monkeypatch, largest) -> None:
    monkeypatch.setattr(floor, "floor_function", read_chunks)
    case = bench_argmin.Case("small", (2, 64, 128), 1, torch.float32, largest)
    inputs = [torch.randn(case.shape) for _ in range(2)]
    made = bench_argmin.make_contestants(case, inputs, contest.Options(peers=("torch",)))
    assert set(made) == {"cute_moe", "torch", "torch_amin", "floor"}
    results = contest.take_turns(made, 2)
    assert {name: result.check for name, result in results.items()} == dict.fromkeys(made, "ok")
    for contestant in made.values():
        contestant.poison()
        assert contestant.check().startswith("2 of 2 ")


def test_a_peer_that_fails_when_called_costs_the_host_mode_nothing(
    no_gpu, pool, monkeypatch, capsys
) -> None:
    x = torch.randn(1, SHAPE.hidden).bfloat16()
    inputs = (x, torch.randn(1, SHAPE.num_experts).bfloat16(), *pool.copies[0])
    want = reference.moe_block_fp8(*inputs, protocol.TOP_K)
    found = {
        "flashinfer": peers.Peer(broken, pool.copies, 0.05),
        "vllm_triton": peers.Peer(lambda *_: want, pool.copies, 0.05),
        "torch": peers.plain_torch(pool.copies, SHAPE),
    }
    monkeypatch.setattr(bench_host, "make_inputs", lambda: (*inputs, torch.empty_like(x)))
    monkeypatch.setattr(bench_host, "find_peers", lambda options, copies: found)
    monkeypatch.setattr(bench_host, "capture", FakeGraph)
    monkeypatch.setattr(bench_host, "BURST", 1)
    monkeypatch.setattr(cute_moe, "alloc_scratchpad", lambda device: None)
    monkeypatch.setattr(cute_moe, "MoELayer", lambda tensors, top_k: lambda *_: want)

    def ours(*tensors, out, scratchpad):
        return out.copy_(reference.moe_block_fp8(*tensors))

    monkeypatch.setattr(cute_moe, "mono_moe", ours)
    results = bench_host.call_results(contest.Options(), bursts=protocol.LAUNCHES)
    cases = [(contestant, case) for contestant, case, _ in results]
    assert cases[:3] == [("cute_moe", "call of mono_moe"), ("cute_moe", "call of MoELayer"),
                         ("vllm_triton", "call")]  # fmt: skip
    assert len(cases) == 4 and cases[3][1].startswith("a launch of a replayed graph")
    assert {result.check for *_, result in results} == {"ok"}
    assert contest.SKIPPED == {"flashinfer": "RuntimeError: no kernel image"}
    assert "flashinfer: skipped" in capsys.readouterr().out
