"""The reference against a slow, independent version: scalar loops in Python floats and fp64."""

import math
from typing import NamedTuple

import pytest
import torch

from cute_moe import reference
from cute_moe.reference import relative_error

E, K, N = 5, 256, 128
FLT_MAX = torch.finfo(torch.float32).max
NAN, INF = math.nan, math.inf
# Every finite e4m3 value, as Python floats: rounding by search instead of by a cast.
E4M3_VALUES = sorted(
    {v for v in torch.arange(256).to(torch.uint8).view(reference.E4M3).tolist() if v == v}
)


class Layer(NamedTuple):
    w_up: torch.Tensor
    s_up: torch.Tensor
    w_down: torch.Tensor
    s_down: torch.Tensor


@pytest.fixture(scope="module")
def layer() -> Layer:
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(E, 2 * N, K, generator=generator) * 0.1
    down = torch.randn(E, K, N, generator=generator) * 0.1
    return Layer(*reference.quantize_blocks(up), *reference.quantize_blocks(down))


def slow_route(row, top_k, scoring, renormalize):
    """(ids, weights) of one token, by sorting and Python's exp."""
    logits = [-INF if math.isnan(v) else v for v in row]
    ids = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:top_k]
    logits = [min(max(v, -FLT_MAX), FLT_MAX) for v in logits]
    if scoring == "softmax":
        top = max(logits)
        scores = [math.exp(max(v - top, -1e4)) for v in logits]
        total = sum(scores[e] for e in (ids if renormalize else range(len(scores))))
        return ids, [scores[e] / total for e in ids]
    # Below about -88.7 exp(-v) is no finite fp32, and the score is 0.
    scores = [1 / (1 + math.exp(-v)) if v > -88.7 else 0.0 for v in logits]
    total = max(sum(scores[e] for e in ids), 2.0**-126) if renormalize else 1.0
    return ids, [scores[e] / total for e in ids]


def round_e4m3(value: float) -> float:
    """Nearest value that e4m3 has, ties to the even mantissa."""
    nearest = min(abs(v - value) for v in E4M3_VALUES)
    found = [v for v in E4M3_VALUES if abs(v - value) == nearest]
    if len(found) == 1:
        return found[0]
    bits = torch.tensor(found).to(reference.E4M3).view(torch.uint8).tolist()
    return next(v for v, b in zip(found, bits, strict=True) if b % 2 == 0)


def slow_quantise(row: torch.Tensor, size: int = 128) -> torch.Tensor:
    """One row through e4m3 and back, fp64, in blocks of `size`."""
    out = []
    for block in row.float().split(size):
        scale = torch.maximum(block.abs().max(), torch.tensor(1e-10)) / torch.tensor(448.0)
        out += [round_e4m3(float(v)) * float(scale) for v in block / scale]
    return torch.tensor(out, dtype=torch.float64)


def slow_dequantise(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Weights in fp64, scales spread by a Kronecker product."""
    block = [size // count for size, count in zip(q.shape, s.shape, strict=True)]
    return q.double() * torch.kron(s.double(), torch.ones(block, dtype=torch.float64))


def slow_layer(x, logits, layer: Layer, top_k, quantised, scoring="softmax", renormalize=True):
    """The layer token by token in fp64; with `quantised`, the activations go through e4m3."""
    routed = [slow_route(row, top_k, scoring, renormalize) for row in logits.tolist()]
    return slow_routed(x, routed, layer, quantised)


def slow_routed(x, routed, layer: Layer, quantised, h_block=128):
    """The same for (ids, weights) of each token; what is no expert is left out."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(routed):
        for expert, weight in zip(ids, weights, strict=True):
            if not 0 <= expert < len(layer.w_up):
                continue
            up = slow_dequantise(layer.w_up[expert], layer.s_up[expert])
            down = slow_dequantise(layer.w_down[expert], layer.s_down[expert])
            gate, value = (
                up @ (slow_quantise(x[token]) if quantised else x[token].double())
            ).chunk(2)
            h = gate * torch.sigmoid(gate) * value
            h = slow_quantise(h.float().bfloat16(), h_block) if quantised else h
            out[token] += weight * (down @ h)
    return out


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "row",
    [
        [0.5, -1.0, 2.0, 0.25, 3.0],
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [0.0, -0.0, 0.0, -0.0, -1.0],
        [NAN, 1.0, NAN, -2.0, 0.5],
        [INF, 1.0, INF, -INF, 0.5],
        [-INF, NAN, -INF, NAN, -INF],
        [1e30, -1e30, 50.0, 100.0, 100.0],
        [-80.0, -60.0, -70.0, -100.0, -120.0],
        [-90.0, -100.0, -110.0, -120.0, -130.0],
    ],
)
def test_route(row, scoring, renormalize) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([row], dtype=dtype)
        for top_k in range(1, 6):
            ids, weights = reference.route(logits, top_k, scoring, renormalize)
            want_ids, want = slow_route(logits[0].tolist(), top_k, scoring, renormalize)
            assert ids.dtype == torch.int64 and weights.dtype == torch.float32
            assert ids.tolist() == [want_ids]
            torch.testing.assert_close(weights, torch.tensor([want]), rtol=1e-5, atol=1e-37)


def test_route_breaks_many_ties_by_the_lower_id() -> None:
    logits = torch.randint(-3, 4, (64, 256)).bfloat16()
    ids, _ = reference.route(logits, 8)
    for row, found in zip(logits.tolist(), ids.tolist(), strict=True):
        assert found == sorted(range(256), key=lambda e: (-row[e], e))[:8]


def test_route_names_what_is_wrong() -> None:
    logits = torch.zeros(2, E)
    for top_k in (0, E + 1):
        with pytest.raises(ValueError, match=f"top_k: expected 1..{E}, got {top_k}"):
            reference.route(logits, top_k)
    with pytest.raises(ValueError, match="scoring_func: .*got 'tanh'"):
        reference.route(logits, 2, "tanh")
    with pytest.raises(ValueError, match="router_logits"):
        reference.route(logits[0], 2)


@pytest.mark.parametrize("magnitude", [0.0, 1e-12, 1e-3, 1.0, 1e30])
def test_quantize_activations(magnitude) -> None:
    x = (torch.randn(2, K) * magnitude).bfloat16()
    q, scale = reference.quantize_activations(x)
    assert q.shape == (2, K) and q.dtype == reference.E4M3
    assert scale.shape == (2, K // 128) and scale.dtype == torch.float32
    got = q.double() * scale.double().repeat_interleave(128, dim=1)
    assert torch.equal(got, torch.stack([slow_quantise(row) for row in x]))


def test_quantize_rounds_ties_to_even_and_saturates() -> None:
    x = torch.zeros(1, 128)
    x[0, :5] = torch.tensor([448.0, 17.0, 19.0, -17.0, 2.0**-10])  # 17, 19: between two values
    q, scale = reference.quantize_activations(x)
    assert scale.item() == 1.0
    assert q[0, :5].tolist() == [448.0, 16.0, 20.0, -16.0, 0.0]
    # amax/448 rounded down makes the largest value come out above 448.
    x = torch.arange(1, 4001).float()[:, None].expand(-1, 128)
    q, scale = reference.quantize_activations(x)
    assert (x[:, :1] / scale).max() > 448.0
    assert (q.float() == 448.0).all()


def test_blocks_round_trip() -> None:
    w = torch.randn(3, 256, 384)
    q, scale = reference.quantize_blocks(w)
    assert q.shape == w.shape and scale.shape == (3, 2, 3)
    back = reference.dequantize_blocks(q, scale)
    for block_row in range(2):
        for block in range(3):
            rows = slice(128 * block_row, 128 * block_row + 128)
            columns = slice(128 * block, 128 * block + 128)
            amax = w[:, rows, columns].abs().amax(dim=(1, 2))
            torch.testing.assert_close(scale[:, block_row, block], amax / 448)
            worst = (back - w)[:, rows, columns].abs().amax(dim=(1, 2))
            assert (worst <= amax / 28 * 1.001).all()  # half a step of 32 at 448
    assert torch.equal(back[1], slow_dequantise(q[1], scale[1]).float())
    bf16 = scale.bfloat16()
    assert torch.equal(
        reference.dequantize_blocks(q, bf16), reference.dequantize_blocks(q, bf16.float())
    )


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_layer(layer, tokens, magnitude) -> None:
    x = (torch.randn(tokens, K) * magnitude).bfloat16()
    x[1:2] = 0  # one zero token
    logits = torch.randn(tokens, E).bfloat16()
    for scoring, renormalize in (("softmax", True), ("sigmoid", False)):
        routing = (2, scoring, renormalize)
        fp8 = reference.moe_block_fp8(x, logits, *layer, *routing)
        meant = reference.moe_fp32(x, logits, *layer, *routing)
        assert fp8.shape == meant.shape == (tokens, K)
        assert fp8.dtype == torch.bfloat16 and meant.dtype == torch.float32
        want = slow_layer(x, logits, layer, 2, True, scoring, renormalize)
        # bf16 output, and h rounded to the other neighbour here and there.
        assert relative_error(fp8, want) < 5e-3
        want = slow_layer(x, logits, layer, 2, False, scoring, renormalize)
        assert relative_error(meant, want) < 1e-5
        assert not fp8[1:2].any() and not meant[1:2].any()


def test_fp8_is_near_the_meaning(layer) -> None:
    x, logits = torch.randn(8, K).bfloat16(), torch.randn(8, E)
    fp8 = reference.moe_block_fp8(x, logits, *layer, 2)
    meant = reference.moe_fp32(x, logits, *layer, 2)
    assert 1e-3 < relative_error(fp8, meant.double()) < 0.075


def test_dense_is_the_core_of_fp32(layer) -> None:
    x, logits = torch.randn(4, K).bfloat16(), torch.randn(4, E)
    ids, weights = reference.route(logits, 3)
    up = reference.dequantize_blocks(layer.w_up, layer.s_up)
    down = reference.dequantize_blocks(layer.w_down, layer.s_down)
    got = reference.moe_fp32_dense(x, ids, weights, up, down)
    assert torch.equal(got, reference.moe_fp32(x, logits, *layer, 3))
    assert torch.equal(
        reference.moe_block_fp8_routed(x, ids, weights, *layer),
        reference.moe_block_fp8(x, logits, *layer, 3),
    )


@pytest.mark.parametrize("function", [reference.moe_block_fp8, reference.moe_fp32])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_rows_do_not_depend_on_the_batch(layer, function, scoring) -> None:
    for tokens in (2, 8, 33):
        x, logits = torch.randn(tokens, K).bfloat16(), torch.randn(tokens, E)
        logits[tokens // 2 :] = logits[0]  # several tokens on the same experts
        together = function(x, logits, *layer, 2, scoring)
        for first in range(tokens):
            rows = slice(first, first + 1 + first % 3)
            got = function(x[rows], logits[rows], *layer, 2, scoring)
            assert torch.equal(got, together[rows]), (tokens, first)


@pytest.mark.parametrize("experts", [5, 13, 256])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routes_do_not_depend_on_the_batch(experts, scoring) -> None:
    """Also where a row is no whole number of the vectors that torch computes with."""
    logits = torch.randn(300, experts) * 3
    for renormalize in (True, False):
        _, together = reference.route(logits, 4, scoring, renormalize)
        for row in range(300):
            _, alone = reference.route(logits[row : row + 1], 4, scoring, renormalize)
            assert torch.equal(alone, together[row : row + 1]), row


@pytest.mark.parametrize("function", [reference.moe_block_fp8, reference.moe_fp32])
def test_modes_of_torch_change_nothing(layer, function) -> None:
    x, logits = torch.randn(4, K).bfloat16(), torch.randn(4, E)
    want = function(x, logits, *layer, 2)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(function(x, logits, *layer, 2), want)
    finally:
        torch.set_float32_matmul_precision(before)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert torch.equal(function(x, logits, *layer, 2), want), dtype


def test_nan_and_infinite_logits_give_finite_results(layer) -> None:
    x = torch.randn(3, K).bfloat16()
    logits = torch.randn(3, E)
    logits[0], logits[1, 0], logits[2, 4] = NAN, INF, -INF
    out = reference.moe_block_fp8(x, logits, *layer, 2)
    assert out.isfinite().all()
    want = slow_layer(x, logits, layer, 2, True)
    assert relative_error(out, want) < 5e-3


def test_shapes_that_do_not_fit(layer) -> None:
    x, logits = torch.randn(2, 128).bfloat16(), torch.randn(2, E)
    for function in (reference.moe_fp32, reference.moe_block_fp8):
        with pytest.raises(ValueError, match=r"w_up, w_down: expected \[E, 2N, 128\]"):
            function(x, logits, *layer, 2)
    with pytest.raises(ValueError, match=r"expected x \[M, K\]"):
        reference.moe_fp32(x[0], logits, *layer, 2)


BLOCKS = [(192, 64, 128), (192, 64, 64), (96, 32, 128), (96, 32, 32), (256, 64, 64), (128, 32, 128)]


def layer_in_blocks(n: int, b: int, c: int, dtype: torch.dtype = torch.float32) -> Layer:
    up, s_up = reference.quantize_blocks(torch.randn(E, 2 * n, K) * 0.1, b, c)
    down, s_down = reference.quantize_blocks(torch.randn(E, K, n) * 0.1, c, b)
    assert s_up.shape == (E, 2 * n // b, K // c) and s_down.shape == (E, K // c, n // b)
    return Layer(up, s_up.to(dtype), down, s_down.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("n, b, c", BLOCKS)
def test_smaller_blocks(n, b, c, dtype) -> None:
    layer = layer_in_blocks(n, b, c, dtype)
    assert reference.scale_blocks(*layer) == (b, c)
    x, logits = torch.randn(3, K).bfloat16(), torch.randn(3, E)
    ids, weights = reference.route(logits, 2)
    routed = list(zip(ids.tolist(), weights.tolist(), strict=True))
    got = reference.moe_block_fp8(x, logits, *layer, 2)
    assert relative_error(got, slow_routed(x, routed, layer, True, b)) < 5e-3
    meant = reference.moe_fp32(x, logits, *layer, 2)
    assert relative_error(meant, slow_routed(x, routed, layer, False)) < 1e-5
    assert torch.equal(got, reference.moe_block_fp8(x, logits, *map_scales(layer), 2))
    for row in range(3):
        alone = reference.moe_block_fp8(x[row : row + 1], logits[row : row + 1], *layer, 2)
        assert torch.equal(alone, got[row : row + 1])


def map_scales(layer: Layer) -> Layer:
    """Scales of the same values in fp32."""
    return layer._replace(s_up=layer.s_up.float(), s_down=layer.s_down.float())


def test_h_is_quantised_in_the_blocks_of_the_down_weights() -> None:
    """In larger blocks the small half of h would vanish beside the large one."""
    layer = layer_in_blocks(128, 64, 128)
    layer.s_up[:, 1::2] *= 1e-3  # gate and up rows of features 64..127
    layer.s_down[:, :, 0] = 0.0  # so that only these count
    x, one = torch.randn(1, K).bfloat16(), torch.ones(1, 1)
    got = reference.moe_block_fp8_routed(x, torch.zeros(1, 1, dtype=torch.int32), one, *layer)
    fine = slow_routed(x, [([0], [1.0])], layer, True, 64)
    coarse = slow_routed(x, [([0], [1.0])], layer, True, 128)
    assert relative_error(got, fine) < 5e-3 < 0.05 < relative_error(coarse, fine)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_given_routing(layer, dtype) -> None:
    x = torch.randn(4, K).bfloat16()
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[0, 3, 3], [E, 1, -1], [low, high, E], [2, 2, 2]], dtype=dtype)
    weights = torch.tensor([[0.5, 0.25, 1.0], [NAN, 1.0, INF], [NAN, INF, 1.0], [-1.0, 2.0, 0.5]])
    routed = list(zip(ids.tolist(), weights.tolist(), strict=True))
    want = slow_routed(x, routed, layer, True)
    got = reference.moe_block_fp8_routed(x, ids, weights, *layer)
    assert relative_error(got, want) < 5e-3 and not got[2].any()
    tripled = reference.moe_block_fp8_routed(x, ids, weights, *layer, 3.0)
    assert relative_error(tripled, 3 * want) < 5e-3
    meant = reference.moe_fp32_routed(x, ids, weights, *layer, 3.0)
    assert relative_error(meant, 3 * slow_routed(x, routed, layer, False)) < 1e-5
    rounded = weights.bfloat16()
    assert torch.equal(reference.moe_block_fp8_routed(x, ids, rounded, *layer), got)


def test_local_ids() -> None:
    ids = torch.tensor([[0, 4, 5, -1], [2**31 - 1, -(2**31), 1, 3]], dtype=torch.int32)
    assert reference.local_ids(ids, 5).tolist() == [[0, 4, -1, -1], [-1, -1, 1, 3]]
    table = torch.tensor([2, -1, 0, 5, -7, 4], dtype=torch.int32)
    found = reference.local_ids(ids, 5, table)
    assert found.tolist() == [[2, -1, 4, -1], [-1, -1, -1, -1]] and found.dtype == torch.int64
    assert reference.local_ids(ids[:0], 5, table).shape == (0, 4)


def test_scales_that_are_no_blocks(layer) -> None:
    x, logits = torch.randn(1, K).bfloat16(), torch.randn(1, E)
    for name, shape in (("s_down", (E, 2, 3)), ("s_down", (E, 8, 2)), ("s_up", (E, 4, 2)),
                        ("s_up", (E, 2, 1)), ("s_down", (E, 2))):  # fmt: skip
        wrong = layer._replace(**{name: torch.ones(shape)})
        for function in (reference.moe_fp32, reference.moe_block_fp8):
            with pytest.raises(ValueError, match=f"^{name}: expected .*got "):
                function(x, logits, *wrong, 2)
