"""Shapes side by side on a GPU: shared scratchpads, and which kernel a call finds."""

import pytest
import torch
from moe_cases import Shape, draw_inputs, draw_weights

import cute_moe

pytestmark = pytest.mark.gpu
ONE_LAYOUT = [Shape(16, 1024, 512, 4), Shape(24, 2048, 256, 8), Shape(8, 512, 1024, 2)]
NEAR = [Shape(8, 512, 128, 2, 64), Shape(8, 512, 128, 2), Shape(8, 512, 128, 2, 64, 64),
        Shape(8, 512, 64, 2, 64), Shape(8, 1024, 128, 2)]  # fmt: skip


def test_shapes_of_one_layout_share_a_scratchpad(cuda) -> None:
    layers = [draw_weights(shape, cuda).quantised for shape in ONE_LAYOUT]
    pad = cute_moe.alloc_scratchpad(cuda, intermediate=512, top_k=4)
    for i in range(60):
        which = (i * 7 // 3) % len(ONE_LAYOUT)
        shape, tensors = ONE_LAYOUT[which], layers[which]
        x, logits = draw_inputs(shape, 1 + (5 * i) % 8, cuda)
        want = cute_moe.mono_moe(x, logits, *tensors, shape.top_k)
        got = cute_moe.mono_moe(x, logits, *tensors, shape.top_k, scratchpad=pad)
        assert torch.equal(got, want), i


def test_calls_of_several_shapes_in_turn(cuda) -> None:
    layers = [draw_weights(shape, cuda).quantised for shape in NEAR]
    for _ in range(3):
        for shape, tensors in zip(NEAR, layers, strict=True):
            x, logits = draw_inputs(shape, 3, cuda)
            got = cute_moe.mono_moe(x, logits, *tensors, shape.top_k)
            near = cute_moe.mono_moe(
                x.cpu(), logits.cpu(), *(tensor.cpu() for tensor in tensors), shape.top_k
            )
            assert cute_moe.reference.relative_error(got.cpu(), near) <= 0.05, shape


def test_a_scratchpad_of_another_layout_is_refused_also_by_later_calls(cuda) -> None:
    shape = NEAR[0]
    tensors = draw_weights(shape, cuda).quantised
    x, logits = draw_inputs(shape, 3, cuda)
    out = torch.full_like(x, 7.0)
    for _ in range(2):
        for wrong in (cute_moe.alloc_scratchpad(cuda), torch.zeros(128, dtype=torch.uint8)):
            with pytest.raises(ValueError, match="^scratchpad: expected"):
                cute_moe.mono_moe(
                    x, logits, *tensors, shape.top_k, out=out, scratchpad=wrong.to(cuda)
                )
        torch.cuda.synchronize()
        assert (out == 7.0).all()
        cute_moe.mono_moe(x, logits, *tensors, shape.top_k)
