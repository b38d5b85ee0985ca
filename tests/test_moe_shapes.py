"""`mono_moe` at other shapes on the CPU: what is taken, what is refused, scratchpads, routing."""

import pytest
import torch
from moe_cases import Shape, draw_inputs, draw_weights
from moe_errors import unexplained

import cute_moe
from cute_moe import moe, reference
from cute_moe.host.scratch import Region, ScratchLayout
from cute_moe.kernels.moe.spec import MoeSpec, scratch_regions_of

SHAPES = [
    Shape(8, 512, 192, 2, 64),
    Shape(5, 640, 352, 3, 32, 32),
    Shape(3, 512, 352, 3, 32),
    Shape(33, 512, 128, 9),
    Shape(16, 512, 64, 16, 64, 64),
    Shape(1, 512, 32, 1, 32),
]
SMALL = SHAPES[0]


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, activations) -> None:
    weights = draw_weights(shape)
    x, logits = draw_inputs(shape, 5)
    got = cute_moe.mono_moe(x, logits, *weights.quantised, shape.top_k, activations=activations)
    ids, routed = reference.route(logits, shape.top_k)
    exact = reference.moe_fp32_dense(x, ids, routed, weights.up_fp32, weights.down_fp32)
    assert reference.relative_error(got, exact) < 0.1
    compute = reference.moe_block_fp8 if activations == "fp8" else reference.moe_fp32
    want = compute(x, logits, *weights.quantised, shape.top_k)
    assert torch.equal(got, want.bfloat16())
    rows = [
        cute_moe.mono_moe(
            x[t : t + 1], draw.clone(), *weights.quantised, shape.top_k, activations=activations
        )
        for t, draw in enumerate(logits.split(1))
    ]
    assert torch.equal(torch.cat(rows), got)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float8_e8m0fnu", "bfloat16"),
                                    ("float32", "float8_e8m0fnu")])  # fmt: skip
def test_dtypes_of_scales(dtypes) -> None:
    up, s_up, down, s_down = draw_weights(SMALL).quantised
    s_up, s_down = (s.to(getattr(torch, d)) for s, d in zip((s_up, s_down), dtypes, strict=True))
    x, logits = draw_inputs(SMALL, 4)
    got = cute_moe.mono_moe(x, logits, up, s_up, down, s_down, 2)
    assert got.any()
    assert torch.equal(got, cute_moe.mono_moe(x, logits, up, s_up.float(), down, s_down.float(), 2))


def tensors_of(e: int, k: int, n: int, block: int = 128, columns: int = 128, m: int = 1):
    """Arguments of a shape without memory."""
    fp8 = {"dtype": torch.float8_e4m3fn, "device": "meta"}
    return (
        torch.empty(m, k, dtype=torch.bfloat16, device="meta"),
        torch.empty(m, e, device="meta"),
        torch.empty(e, 2 * n, k, **fp8),
        torch.empty(e, 2 * n // block, k // columns, device="meta"),
        torch.empty(e, k, n, **fp8),
        torch.empty(e, k // columns, n // block, device="meta"),
    )


@pytest.mark.parametrize(
    "e, k, n, top_k, block",
    [
        (1024, 8192, 16384, 16, 128), (1, 512, 32, 1, 32), (256, 7168, 2048, 8, 128),
        (128, 2048, 192, 8, 64), (128, 4096, 352, 8, 32), (513, 4096, 1024, 11, 128),
        (8, 4096, 14336, 2, 128),
    ],
)  # fmt: skip
def test_limits_are_taken(e, k, n, top_k, block) -> None:
    for columns in {128, block}:
        out = cute_moe.mono_moe(*tensors_of(e, k, n, block, columns), top_k)
        assert out.shape == (1, k) and out.is_meta


@pytest.mark.parametrize(
    "e, k, n, top_k, text",
    [
        (1025, 512, 128, 2, "num_experts: expected 1..1024, got 1025"),
        (0, 512, 128, 2, "num_experts: expected 1..1024, got 0"),
        (8, 384, 128, 2, "hidden: expected 512..8192, got 384"),
        (8, 8320, 128, 2, "hidden: expected 512..8192, got 8320"),
        (8, 576, 128, 2, "hidden: expected a multiple of 128, got 576"),
        (8, 512, 16, 2, "intermediate: expected 32..16384, got 16"),
        (8, 512, 16512, 2, "intermediate: expected 32..16384, got 16512"),
        (8, 512, 80, 2, "intermediate: expected a multiple of 32, got 80"),
        (8, 512, 128, 17, "top_k: expected 1..16, got 17"),
        (8, 512, 128, 9, "top_k: expected 1..8, got 9"),
    ],
)
def test_shapes_beyond_the_limits(e, k, n, top_k, text) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        cute_moe.mono_moe(*tensors_of(e, k, n), top_k)
    if top_k != 9:
        with pytest.raises(ValueError, match=f"^{text}$"):
            cute_moe.alloc_scratchpad("cpu", num_experts=e, hidden=k, intermediate=n, top_k=top_k)


@pytest.mark.parametrize(
    "number, shape, text",
    [
        (2, (8, 384, 512), r"expert_weights_up: expected \[8, 256, 512\], N = 128 as in expert_w"),
        (2, (7, 256, 512), r"expert_weights_up: expected \[E, 2N, K\].*E = 8 as in router_logits"),
        (4, (8, 640, 128), r"expert_weights_down: .*K = 512 as in activations_in"),
        (3, (8, 4, 4), r"expert_scales_up: expected \[8, 2, 4\], blocks of 128 x 128"),
        (3, (8, 2, 4, 1), r"expert_scales_up: expected \[8, 2, 4\], blocks"),
        (5, (8, 4, 3), r"expert_scales_down: expected \[8, 512/c, 128/b\], b = 128, 64 or 32"),
        (5, (8, 16, 2), r"expert_scales_down: expected \[8, 512/c, 128/b\]"),
        (5, (8, 8, 2), r"expert_scales_up: expected \[8, 4, 8\], blocks of 64 x 64"),
    ],
)
def test_tensors_that_do_not_fit(number, shape, text) -> None:
    tensors = list(tensors_of(8, 512, 128))
    tensors[number] = torch.empty(shape, dtype=tensors[number].dtype, device="meta")
    with pytest.raises(ValueError, match=f"^{text}"):
        cute_moe.mono_moe(*tensors, 2)


def test_interleaved_rows_are_for_one_shape() -> None:
    for shape in ((8, 512, 128), (256, 2048, 512, 64), (255, 2048, 512)):
        with pytest.raises(ValueError, match="^interleave_up: expected True unless .*'hidden': 2"):
            cute_moe.mono_moe(*tensors_of(*shape), 2, interleave_up=False)
    for top_k in (2, 8):
        cute_moe.mono_moe(*tensors_of(256, 2048, 512), top_k, interleave_up=False)


def specs_of(monkeypatch, shapes) -> list[MoeSpec]:
    """The variant for the tensors of each shape, as on a GPU of 78 SMs."""
    facts = type("Facts", (), {"sm_count": 78})
    monkeypatch.setattr(moe, "device_facts", lambda index: facts)
    specs = []
    for shape in shapes:
        inputs = (*draw_inputs(shape, 3), *draw_weights(shape).quantised)
        found = moe.contract.check_mono(inputs, shape.top_k, None, None, None)
        specs.append(moe._spec(found, inputs[2:], {"top_k": shape.top_k}))
    return specs


def test_the_variant_is_that_of_the_tensors(monkeypatch) -> None:
    for shape, spec in zip(SHAPES, specs_of(monkeypatch, SHAPES), strict=True):
        found = (spec.num_experts, spec.hidden, spec.intermediate, spec.top_k, spec.scale_block,
                 spec.scale_block_hidden)  # fmt: skip
        assert found == tuple(shape) and spec.grid == 78


def test_every_variant_has_its_own_key(monkeypatch) -> None:
    """A kernel rejects other shapes for good: no key may lead to that of another shape."""
    near = [
        Shape(8, 512, 128, 2), Shape(8, 512, 128, 2, 64), Shape(8, 512, 128, 2, 64, 64),
        Shape(8, 512, 128, 2, 32), Shape(8, 512, 128, 2, 32, 32), Shape(8, 512, 256, 2),
        Shape(8, 512, 64, 2, 64), Shape(8, 512, 32, 2, 32), Shape(16, 512, 64, 2, 64),
        Shape(8, 1024, 64, 2, 64), Shape(8, 1024, 128, 2), Shape(8, 512, 128, 3),
    ]  # fmt: skip
    keys, names = [], []
    monkeypatch.setattr(moe._KERNELS, "lookup", keys.append)
    for shape in near:
        e, k, n, top_k, *blocks = shape
        x, logits, up, s_up, down, s_down = tensors_of(e, k, n, *blocks, m=2)
        weights = x.new_empty(2, top_k)
        for scale in (torch.float32, torch.bfloat16):
            scales = {"w1_scale": s_up.to(scale), "w2_scale": s_down}
            cute_moe.mono_moe(x, logits, up, s_up.to(scale), down, s_down, shape.top_k)
            cute_moe.fused_experts(x, up, down, weights, weights.int(), **scales)
            names += [("logits", shape, scale), ("ids", shape, scale)]
    assert len(set(keys)) == len(keys) == len(set(names))


def test_scratchpads_of_two_layouts_differ_in_size() -> None:
    """Equal sizes have equal regions, and a size is a layout's alone."""
    layouts = {}
    for intermediate in range(32, 16385, 32):
        for top_k in range(1, 17):
            regions = scratch_regions_of(intermediate, top_k)
            size = cute_moe.get_scratchpad_size_bytes(intermediate=intermediate, top_k=top_k)
            assert layouts.setdefault(size, regions) == regions
            assert size == sum(nbytes for _, nbytes in regions)  # what the kernel is told
    assert len(layouts) == len(set(layouts.values()))
    sizes = dict(num_experts=64, hidden=7168, intermediate=256, top_k=8)
    pad = cute_moe.alloc_scratchpad("cpu", **sizes)
    assert pad.shape == (cute_moe.get_scratchpad_size_bytes(**sizes),) and not pad.any()
    assert MoeSpec(**sizes).scratch_regions == scratch_regions_of(256, 8)


def test_scratchpads_must_fit_exactly() -> None:
    weights = draw_weights(SMALL).quantised
    x, logits = draw_inputs(SMALL, 2)
    nbytes = cute_moe.get_scratchpad_size_bytes(intermediate=192, top_k=2)
    for size in (nbytes - 128, nbytes + 128, 2 * nbytes):
        pad = ScratchLayout([Region("all", size)]).allocate("cpu")
        with pytest.raises(ValueError, match=rf"^scratchpad: expected \[{nbytes}\] uint8"):
            cute_moe.mono_moe(x, logits, *weights, 2, scratchpad=pad)


def test_routing_out() -> None:
    weights = draw_weights(SMALL).quantised
    x, logits = draw_inputs(SMALL, 3)
    for options in (("softmax", True), ("sigmoid", False)):
        ids, routed = torch.full((3, 2), -7, dtype=torch.int32), torch.full((3, 2), torch.nan)
        got = cute_moe.mono_moe(x, logits, *weights, 2, *options, routing_out=(ids, routed))
        want_ids, want = reference.route(logits, 2, *options)
        assert torch.equal(ids.long(), want_ids) and torch.equal(routed, want)
        assert torch.equal(got, cute_moe.mono_moe(x, logits, *weights, 2, *options))


@pytest.mark.parametrize(
    "change, kind, text",
    [
        (lambda i, w: i, TypeError, r"routing_out: expected \(ids"),
        (lambda i, w: (i,), TypeError, r"routing_out: expected \(ids"),
        (lambda i, w: (i, None), TypeError, r"routing_out\[1\]: expected a torch.Tensor"),
        (lambda i, w: (i.long(), w), ValueError, r"routing_out\[0\]: expected \[M, 2\] int32"),
        (lambda i, w: (i, w.double()), ValueError, r"routing_out\[1\]: expected \[M, 2\] float32"),
        (lambda i, w: (i[:2], w), ValueError, r"routing_out\[0\]: .*M = 3 as in activations_in"),
        (lambda i, w: (i[:, :1], w), ValueError, r"routing_out\[0\]: expected \[M, 2\]"),
        (lambda i, w: (i, i.view(w.dtype)), ValueError, r"routing_out\[1\]: .*with routing_out\[0"),
    ],
)  # fmt: skip
def test_wrong_routing_out(change, kind, text) -> None:
    weights = draw_weights(SMALL).quantised
    x, logits = draw_inputs(SMALL, 3)
    ids, routed = torch.full((3, 2), -7, dtype=torch.int32), torch.full((3, 2), 7.0)
    out = torch.full_like(x, 7.0)
    with pytest.raises(kind, match=f"^{text}"):
        cute_moe.mono_moe(x, logits, *weights, 2, out=out, routing_out=change(ids, routed))
    assert (ids == -7).all() and (routed == 7.0).all() and (out == 7.0).all()


def test_flips_of_h_are_told_from_faults() -> None:
    """What `unexplained` lets pass: two features of h, and no wrong scale, weight or slot."""
    _, _, down, s_down = draw_weights(SMALL).quantised
    columns = reference.dequantize_blocks(down, s_down)
    want, ids = torch.randn(512), torch.tensor([2, 5])
    two = want + 3 * columns[2, :, 17] - 2 * columns[5, :, 190]
    assert reference.relative_error(two, want) > 0.05
    assert unexplained(two, want, ids, down, s_down) < 1e-6
    three = two + 3 * columns[5, :, 40]
    other = want + 3 * columns[3, :, 17]
    scaled = want.clone()
    scaled[:128] *= 1.25
    for wrong in (three, other, scaled, want.roll(1)):
        assert unexplained(wrong, want, ids, down, s_down) > 0.04
