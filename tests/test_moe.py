"""The MoE kernel against the reference, on a GPU: values, determinism, scratch, streams, graphs."""

import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from moe_cases import ROUTINGS, E, K, N, Weights, make_inputs, make_weights
from occupy_kernel import occupy

import cute_moe
from cute_moe import reference
from cute_moe.host.launch import KernelCache
from cute_moe.kernels.moe.kernel import build
from cute_moe.kernels.moe.spec import MoeSpec
from cute_moe.reference import relative_error

pytestmark = pytest.mark.gpu
WORST, MEAN, WORST_UNQUANTISED = 1.5e-2, 6e-3, 0.075


@pytest.fixture(scope="module")
def weights() -> Weights:
    return make_weights(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def pad(cuda: torch.device) -> torch.Tensor:
    return cute_moe.alloc_scratchpad(cuda)


def run(x, logits, weights: Weights, *options, pad=None, **kwargs) -> torch.Tensor:
    """One call into a poisoned output."""
    out = torch.full_like(x, float("nan"))
    options = options or (8,)
    got = cute_moe.mono_moe(
        x, logits, *weights.quantised, *options, out=out, scratchpad=pad, **kwargs
    )
    assert got is out
    return got


def expected(x, logits, weights: Weights, top_k=8, scoring="softmax", renormalize=True):
    return reference.moe_block_fp8(x, logits, *weights.quantised, top_k, scoring, renormalize)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_options(cuda, weights, top_k, scoring, renormalize) -> None:
    pad = cute_moe.alloc_scratchpad(cuda, top_k=top_k)
    for tokens in range(9):
        x, logits = make_inputs(tokens, "random", cuda)
        got = run(x, logits, weights, top_k, scoring, renormalize, pad=pad)
        if tokens:
            want = expected(x, logits, weights, top_k, scoring, renormalize)
            assert relative_error(got, want) <= WORST
        else:
            assert got.shape == (0, K)


def test_errors_over_many_routings(cuda, weights, pad) -> None:
    errors = []
    for routing in ROUTINGS:
        for tokens in range(1, 9):
            x, logits = make_inputs(tokens, routing, cuda)
            got = run(x, logits, weights, pad=pad)
            errors.append(relative_error(got, expected(x, logits, weights)))
            ids, routed = reference.route(logits, 8)
            exact = reference.moe_fp32_dense(x, ids, routed, weights.up_fp32, weights.down_fp32)
            assert relative_error(got, exact) <= WORST_UNQUANTISED, (routing, tokens)
    print(f"relative error: worst {max(errors):.4f}, mean {statistics.mean(errors):.4f}")
    assert max(errors) <= WORST
    assert statistics.mean(errors) <= MEAN


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("raw", [True, False])
def test_formats(cuda, weights, pad, logits_dtype, scales_dtype, raw) -> None:
    up, s_up, down, s_down = weights.quantised
    s_up, s_down = s_up.to(scales_dtype), s_down.to(scales_dtype)
    given = up if raw else cute_moe.interleave_for_tma_wgmma_up(up)
    for tokens in (1, 5, 8):
        x, logits = make_inputs(tokens, "random", cuda, logits_dtype)
        got = cute_moe.mono_moe(
            x, logits, given, s_up, down, s_down, 8, scratchpad=pad, interleave_up=raw
        )
        want = reference.moe_block_fp8(x, logits, up, s_up, down, s_down, 8, "softmax", True)
        assert relative_error(got, want) <= WORST


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ties_go_to_the_lowest_expert(cuda, weights, pad, dtype) -> None:
    x, _ = make_inputs(8, "random", cuda)
    logits = torch.randint(0, 3, (8, E), device=cuda).to(dtype)
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    logits[1, 1::2] = 0.0
    got = run(x, logits, weights, pad=pad)
    assert relative_error(got, expected(x, logits, weights)) <= WORST


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_and_infinite_logits(cuda, weights, pad, scoring, dtype) -> None:
    x, logits = make_inputs(8, "random", cuda, dtype)
    nan, inf = float("nan"), float("inf")
    logits[0] = nan
    logits[1, 3:] = nan
    logits[2, 100:110] = inf
    logits[3] = -inf
    logits[4, 7] = inf
    logits[5, ::2] = -nan
    logits[6, 250:] = -inf
    for renormalize in (True, False):
        got = run(x, logits, weights, 8, scoring, renormalize, pad=pad)
        want = expected(x, logits, weights, 8, scoring, renormalize)
        assert want.isfinite().all()
        for t in range(8):
            if want[t].any():
                assert relative_error(got[t], want[t]) <= WORST, t
            else:
                assert not got[t].any(), t


@pytest.mark.parametrize("magnitude", [1e-3, 1e-9, 1e3, 1e6])
def test_magnitudes_and_a_zero_token(cuda, weights, pad, magnitude) -> None:
    x, logits = make_inputs(8, "random", cuda)
    x *= magnitude
    x[3] = 0.0
    x[5] *= 1e-3
    got = run(x, logits, weights, pad=pad)
    assert not got[3].any()
    want = expected(x, logits, weights)
    for t in (0, 1, 2, 4, 5, 6, 7):
        if want[t].any():
            assert relative_error(got[t], want[t]) <= WORST, t


def test_zero_weights_give_zeros(cuda, weights, pad) -> None:
    x, logits = make_inputs(8, "random", cuda)
    zero = Weights(
        tuple(torch.zeros_like(w) for w in weights.quantised), weights.up_fp32, weights.down_fp32
    )
    assert not run(x, logits, zero, pad=pad).any()


def test_a_nan_input_stays_in_its_token(cuda, weights, pad) -> None:
    x, logits = make_inputs(4, "same", cuda)
    clean = run(x, logits, weights, pad=pad)
    x[2, 5] = float("nan")
    got = run(x, logits, weights, pad=pad)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


def test_same_bits_every_time_and_in_every_batch(cuda, weights, pad) -> None:
    for routing in ROUTINGS:
        x, logits = make_inputs(8, routing, cuda)
        whole = run(x, logits, weights, pad=pad)
        for _ in range(20):
            assert torch.equal(run(x, logits, weights, pad=pad), whole)
        assert torch.equal(run(x, logits, weights), whole), "a fresh scratchpad"
        for tokens in range(1, 8):
            assert torch.equal(run(x[:tokens], logits[:tokens], weights, pad=pad), whole[:tokens])
        for t in range(8):
            row = run(x[t : t + 1], logits[t : t + 1], weights, pad=pad)
            assert torch.equal(row, whole[t : t + 1]), (routing, t)


def test_scratch_is_reused_and_kept_in_order(cuda, weights) -> None:
    """Outputs do not depend on what ran before; bytes past the layout are never touched."""
    size = cute_moe.get_scratchpad_size_bytes()
    big = torch.full((size + 4096,), 0xA5, dtype=torch.uint8, device=cuda)
    big[:size] = 0
    one, two = cute_moe.alloc_scratchpad(cuda), cute_moe.alloc_scratchpad(cuda)
    for i in range(30):
        x, logits = make_inputs(1 + (5 * i) % 8, ROUTINGS[i % len(ROUTINGS)], cuda)
        want = run(x, logits, weights)
        for pad in (big[:size], one if i % 3 else two):
            assert torch.equal(run(x, logits, weights, pad=pad), want), i
    assert (big[size:] == 0xA5).all()
    h = big[: 2 * 64 * N * 2].view(2, -1)
    assert not h[0].any(), "after an even number of launches the next parity must be clear"


@pytest.mark.parametrize("grid", [131, 114, 78, 16])
def test_fewer_sms_give_the_same_bits(cuda, weights, pad, grid) -> None:
    """Grids of GPUs with fewer SMs, in turn with the full one on the same scratchpad."""
    kernel = KernelCache(build).get(MoeSpec(grid=grid), cuda)
    for routing in ROUTINGS:
        for tokens in (1, 4, 8):
            x, logits = make_inputs(tokens, routing, cuda)
            got = torch.full_like(x, float("nan"))
            kernel(x, logits, *weights.quantised, got, pad, None, None)
            assert torch.equal(got, run(x, logits, weights, pad=pad)), (routing, tokens)


@pytest.mark.parametrize("programmatic", [False, True])
def test_two_streams_at_once(cuda, weights, programmatic) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    pads = [cute_moe.alloc_scratchpad(cuda) for _ in streams]
    cases = [make_inputs(m, "random", cuda) for m in (8, 3)]
    want = [run(x, logits, weights) for x, logits in cases]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                out = run(*cases[i], weights, pad=pads[i], programmatic=programmatic)
                got[i].append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, want[i]) for i in range(2) for out in got[i])


def test_threads_with_a_stream_and_a_scratchpad_each(cuda, weights) -> None:
    cases = [make_inputs(m, "random", cuda) for m in (1, 4, 7, 8)]
    want = [run(x, logits, weights) for x, logits in cases]
    torch.cuda.synchronize()

    def work(i: int) -> bool:
        torch.cuda.set_device(cuda)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            pad = cute_moe.alloc_scratchpad(cuda)
            outs = [run(*cases[i], weights, pad=pad) for _ in range(100)]
        stream.synchronize()
        return all(torch.equal(out, want[i]) for out in outs)

    with ThreadPoolExecutor(len(cases)) as pool:
        assert all(pool.map(work, range(len(cases))))


@pytest.mark.parametrize("programmatic", [False, True])
def test_priorities_beside_a_kernel_that_holds_70_sms(cuda, weights, programmatic) -> None:
    """With ordinary launches this dead-locks: each kernel waits for CTAs that find no SM."""
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-5)
    third = torch.cuda.Stream()
    pads = [cute_moe.alloc_scratchpad(cuda) for _ in range(2)]
    x, logits = make_inputs(8, "random", cuda)
    want = run(x, logits, weights)
    occupy(70, 1000)
    torch.cuda.synchronize()
    for _ in range(200):
        with torch.cuda.stream(third):
            occupy(70, 300_000)
        outs = []
        for stream, pad in zip((low, high), pads, strict=True):
            with torch.cuda.stream(stream):
                options = {"pad": pad, "programmatic": programmatic}
                outs += [run(x, logits, weights, **options) for _ in range(3)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in outs)


def test_cuda_graph(cuda, weights, pad) -> None:
    x, logits = make_inputs(8, "random", cuda)
    out = torch.empty_like(x)
    arguments = (x, logits, *weights.quantised, 8)
    cute_moe.mono_moe(*arguments, out=out, scratchpad=pad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            cute_moe.mono_moe(*arguments, out=out, scratchpad=pad)
    for routing in ("random", "same", "disjoint", "skewed", "one"):
        new_x, new_logits = make_inputs(8, routing, cuda)
        x.copy_(new_x)
        logits.copy_(new_logits)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run(new_x, new_logits, weights))


def test_first_call_inside_a_capture_is_refused(cuda, weights) -> None:
    pad = cute_moe.alloc_scratchpad(cuda, top_k=5)
    x, logits = make_inputs(2, "random", cuda)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before capturing"), torch.cuda.graph(graph):
        run(x, logits, weights, 5, pad=pad)
    assert relative_error(run(x, logits, weights, 5), expected(x, logits, weights, 5)) <= WORST


def test_no_allocation_and_no_sync(cuda, weights, pad) -> None:
    x, logits = make_inputs(4, "random", cuda)
    out = torch.empty_like(x)
    arguments = (x, logits, *weights.quantised, 8)
    cute_moe.mono_moe(*arguments, out=out, scratchpad=pad)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        cute_moe.mono_moe(*arguments, out=out, scratchpad=pad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_bad_arguments_leave_out_untouched(cuda, weights, pad) -> None:
    x, logits = make_inputs(4, "random", cuda)
    up, s_up, down, s_down = weights.quantised
    good = dict(activations_in=x, router_logits=logits, expert_weights_up=up, expert_scales_up=s_up,
                expert_weights_down=down, expert_scales_down=s_down, top_k=8,
                scratchpad=pad)  # fmt: skip
    shifted = torch.empty(4 * K + 8, device=cuda, dtype=torch.bfloat16)[1 : 4 * K + 1].view(4, K)
    bad = dict(
        activations_in=[x.float(), x[:, :-1], x.t(), shifted],
        router_logits=[logits.half(), logits[:, :128], logits[:3], logits.cpu()],
        expert_weights_up=[up.view(torch.uint8), up[:, :-1], up[:8], down],
        expert_scales_up=[s_up.half(), s_up[:, :-1], s_up.transpose(1, 2)],
        expert_weights_down=[down.view(torch.int8), down.transpose(1, 2), up],
        expert_scales_down=[s_down.double(), s_down[..., :-1], s_down.cpu()],
        scratchpad=[pad[:-128], pad.float(), pad.cpu(), pad[64:], pad.view(2, -1)],
        top_k=[0, 17, -1],
        scoring_func=["relu", "", None],
    )
    out = torch.full_like(x, 7.0)
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                cute_moe.mono_moe(**{**good, name: value}, out=out)
    for value in (torch.empty(9, K), torch.empty(4, K), torch.empty(4, K, device=cuda), x):
        with pytest.raises(ValueError, match="out"):
            cute_moe.mono_moe(**good, out=value)
    torch.cuda.synchronize()
    assert (out == 7.0).all()
