"""bf16 activations and programmatic launches of the MoE kernel, on a GPU."""

import pytest
import torch
from late_producer import copy_late
from moe_cases import ROUTINGS, K, Weights, make_inputs, make_weights

import cute_moe
from cute_moe import reference
from cute_moe.host.compile import compile_cached
from cute_moe.kernels.moe.kernel import build
from cute_moe.kernels.moe.spec import MoeSpec
from cute_moe.reference import relative_error

pytestmark = pytest.mark.gpu
WORST_BF16 = 3e-3  # against the fp32 product of the dequantised weights
LATE_NS = 100_000


@pytest.fixture(scope="module")
def weights() -> Weights:
    return make_weights(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def pad(cuda: torch.device) -> torch.Tensor:
    return cute_moe.alloc_scratchpad(cuda)


def run(x, logits, weights: Weights, top_k=8, pad=None, **options) -> torch.Tensor:
    """One call into a poisoned output."""
    out = torch.full_like(x, float("nan"))
    return cute_moe.mono_moe(
        x, logits, *weights.quantised, top_k, out=out, scratchpad=pad, **options
    )


@pytest.mark.parametrize("routing", ROUTINGS)
def test_bf16_activations_keep_bf16_precision(cuda, weights, pad, routing) -> None:
    for tokens, top_k in ((1, 8), (2, 8), (5, 8), (8, 8), (8, 3)):
        pad = pad if top_k == 8 else None
        x, logits = make_inputs(tokens, routing, cuda)
        got = run(x, logits, weights, top_k, pad, activations="bf16")
        want = reference.moe_fp32(x, logits, *weights.quantised, top_k)
        assert relative_error(got, want) <= WORST_BF16, (tokens, top_k)


def test_bf16_activations_of_any_size(cuda, weights, pad) -> None:
    """One large feature in a block takes no precision from the others."""
    x, logits = make_inputs(8, "random", cuda)
    x[:, ::128] *= 256.0
    x[1] *= 2.0**-30
    x[2] *= 2.0**20
    got = run(x, logits, weights, 8, pad, activations="bf16")
    want = reference.moe_fp32(x, logits, *weights.quantised, 8)
    for token in range(8):
        assert relative_error(got[token], want[token]) <= WORST_BF16, token


def test_small_features_keep_their_precision_beside_large_ones(cuda, weights, pad) -> None:
    """The large features of every block meet zero weights, so only the small ones count."""
    x, logits = make_inputs(8, "random", cuda)
    x[:, ::128] *= 256.0
    up, *others = weights.quantised
    up = up.clone()
    up.view(torch.uint8)[:, :, ::128] = 0
    changed = (up, *others)
    out = torch.full_like(x, float("nan"))
    got = cute_moe.mono_moe(x, logits, *changed, 8, out=out, scratchpad=pad, activations="bf16")
    assert relative_error(got, reference.moe_fp32(x, logits, *changed, 8)) <= WORST_BF16


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_bf16_activations_pass_on_what_is_not_finite(cuda, weights, pad, value) -> None:
    x, logits = make_inputs(4, "same", cuda)  # all tokens share the columns of every chunk
    clean = run(x, logits, weights, 8, pad, activations="bf16")
    x[2, 77] = value
    got = run(x, logits, weights, 8, pad, activations="bf16")
    assert not torch.isfinite(got[2]).any()
    assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


def test_bf16_activations_with_other_formats(cuda, weights, pad) -> None:
    up, s_up, down, s_down = weights.quantised
    tensors = (up, s_up.bfloat16(), down, s_down.bfloat16())
    given = (cute_moe.interleave_for_tma_wgmma_up(up), *tensors[1:])
    for tokens in (1, 8):
        x, logits = make_inputs(tokens, "random", cuda, torch.float32)
        out = torch.full_like(x, float("nan"))
        cute_moe.mono_moe(
            x, logits, *given, 8, "sigmoid", out=out, scratchpad=pad, interleave_up=False,
            activations="bf16", programmatic=True,
        )  # fmt: skip
        want = reference.moe_fp32(x, logits, *tensors, 8, "sigmoid")
        assert relative_error(out, want) <= WORST_BF16


def test_inference_tensors_and_gradients_give_the_same_bits(cuda, weights, pad) -> None:
    x, logits = make_inputs(4, "random", cuda)
    want = run(x, logits, weights, 8, pad)
    with torch.inference_mode():
        out, frozen = torch.full_like(x, float("nan")), (x.clone(), logits.clone())
        assert torch.equal(run(*frozen, weights, 8, pad), want)
    cute_moe.mono_moe(*frozen, *weights.quantised, 8, out=out, scratchpad=pad)
    assert torch.equal(out, want)
    grown = (x.clone().requires_grad_(), logits.clone().requires_grad_())
    got = cute_moe.mono_moe(*grown, *weights.quantised, 8, scratchpad=pad)
    assert torch.equal(got, want) and not got.requires_grad
    with torch.autocast("cuda", torch.float16):
        assert torch.equal(run(x, logits, weights, 8, pad), want)


def test_bf16_activations_repeat_and_do_not_depend_on_the_batch(cuda, weights, pad) -> None:
    x, logits = make_inputs(8, "skewed", cuda)
    whole = run(x, logits, weights, 8, pad, activations="bf16")
    for _ in range(20):
        assert torch.equal(run(x, logits, weights, 8, pad, activations="bf16"), whole)
    for first in range(8):
        part = slice(first, None)
        got = run(x[part], logits[part], weights, 8, pad, activations="bf16")
        assert torch.equal(got, whole[part])


@pytest.mark.parametrize("grid", [16, 78, 114])
def test_bf16_activations_on_fewer_sms(cuda, weights, grid) -> None:
    spec = MoeSpec(grid=grid, activations="bf16")
    function = compile_cached(spec, lambda options: build(spec, options))
    size = sum(nbytes for _, nbytes in spec.scratch_regions)
    pad = torch.zeros(size, dtype=torch.uint8, device=cuda)
    for routing in ("disjoint", "same", "random"):
        for tokens in (1, 5, 8):
            x, logits = make_inputs(tokens, routing, cuda)
            out = torch.full_like(x, float("nan"))
            function(x, logits, *weights.quantised, out, pad, None, None)
            want = run(x, logits, weights, 8, None, activations="bf16")
            assert torch.equal(out, want), (routing, tokens)


@pytest.mark.parametrize("late", ["x", "logits"])
def test_programmatic_launch_sees_what_a_late_kernel_writes(cuda, weights, pad, late) -> None:
    rows = [make_inputs(8, "random", cuda) for _ in range(2)]
    want = [run(x, logits, weights, 8, pad) for x, logits in rows]
    x, logits = (torch.zeros_like(t) for t in rows[0])
    outs = [torch.full_like(x, float("nan")) for _ in rows]

    def step(source, out) -> None:
        copies = [(source[0], x), (source[1], logits)]
        if late == "x":
            copies.reverse()
        copy_late(*copies[0], 0)
        copy_late(*copies[1], LATE_NS)
        cute_moe.mono_moe(
            x, logits, *weights.quantised, 8, out=out, scratchpad=pad, programmatic=True
        )

    for _ in range(3):
        for source, out in zip(rows, outs, strict=True):
            step(source, out)
    assert all(torch.equal(out, w) for out, w in zip(outs, want, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for source, out in zip(rows, outs, strict=True):
            step(source, out)
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, w) for out, w in zip(outs, want, strict=True))


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_programmatic_launches_in_a_row(cuda, weights, pad, activations) -> None:
    """Each launch reads what the one before wrote, and shares its scratchpad; some are ordinary."""
    up, s_up, down, s_down = weights.quantised
    tensors = (up, s_up, down, s_down * 10.0)  # so that outputs stay about as large as inputs
    x, _ = make_inputs(8, "random", cuda)
    logits = [make_inputs(8, "random", cuda)[1] for _ in range(5)]

    def chain(programmatic: list[bool]) -> list[torch.Tensor]:
        outs = [torch.full((8, K), float("nan"), dtype=x.dtype, device=cuda) for _ in logits]
        current = x
        for router, out, early in zip(logits, outs, programmatic, strict=True):
            current = cute_moe.mono_moe(
                current, router, *tensors, 8, out=out, scratchpad=pad, activations=activations,
                programmatic=early,
            )  # fmt: skip
        return outs

    want = chain([False] * 5)
    assert 1e-6 < float(want[-1].float().norm()) < 1e6
    for kinds in ([True] * 5, [True, False, True, True, False]):
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(chain(kinds), want, strict=True))
