"""MoELayer: chunks of 8 tokens, shapes, dtypes that stay, routing taken from config.json."""

import copy
import functools
import inspect
import json
from dataclasses import replace

import pytest
import torch

from cute_moe import layer as layer_module
from cute_moe import moe, reference
from cute_moe.checkpoint import CheckpointError, LayerTensors
from cute_moe.layer import MoELayer
from cute_moe.shapes import LayerShape
from cute_moe.synthetic import write_synthetic_checkpoint

SMALL = LayerShape(num_experts=6, hidden=512, intermediate=128, top_k=3)
FULL = LayerShape()
ACTIVE = 3  # experts with weights in the layer of full size, where most are left zero


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call of `mono_moe`, which also keeps the last call's options."""
    calls = []
    signature, real = inspect.signature(moe.mono_moe), moe.mono_moe

    def mono_moe(*arguments, **keywords):
        given = signature.bind(*arguments, **keywords)
        given.apply_defaults()
        x, logits = arguments[:2]
        assert x.is_contiguous() and logits.is_contiguous() and len(x) <= 8
        mono_moe.options = {name: given.arguments[name] for name in ("activations", "programmatic")}
        calls.append(len(x))
        return real(*arguments, **keywords)

    monkeypatch.setattr(layer_module, "mono_moe", mono_moe)
    return calls


@pytest.fixture
def small(tmp_path, launches) -> MoELayer:
    write_synthetic_checkpoint(tmp_path, 1, SMALL, shards=2)
    return MoELayer.from_checkpoint(tmp_path, 1, "cpu", shared_expert="ignore")


@pytest.fixture(scope="module")
def full() -> MoELayer:
    e, k, n = FULL.num_experts, FULL.hidden, FULL.intermediate
    w_up = torch.zeros(e, 2 * n, k, dtype=reference.E4M3)
    w_down = torch.zeros(e, k, n, dtype=reference.E4M3)
    s_up, s_down = torch.ones(e, 2 * n // 128, k // 128), torch.ones(e, k // 128, n // 128)
    for expert in range(ACTIVE):
        up, down = torch.randn(2 * n, k) * 0.02, torch.randn(k, n) * 0.02
        w_up[expert], s_up[expert] = reference.quantize_blocks(up)
        w_down[expert], s_down[expert] = reference.quantize_blocks(down)
    return MoELayer(LayerTensors(w_up, s_up, w_down, s_down), top_k=ACTIVE)


def expected(layer: MoELayer, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return reference.moe_block_fp8(
        x, logits, layer.w_up, layer.s_up, layer.w_down, layer.s_down, layer.top_k,
        layer.scoring_func, layer.renormalize,
    )  # fmt: skip


def test_full_size_goes_through_mono_moe(full) -> None:
    x = torch.randn(2, 5, FULL.hidden).bfloat16()
    logits = torch.randn(2, 5, FULL.num_experts) - 100.0
    logits[..., :ACTIVE] += 200.0
    before = x.clone()
    out = full(x, logits)
    assert out.shape == x.shape and out.dtype == torch.bfloat16
    assert torch.equal(x, before) and out.data_ptr() != x.data_ptr()
    flat = out.flatten(0, 1)
    assert torch.equal(flat, expected(full, x.flatten(0, 1), logits.flatten(0, 1)))
    assert flat.any()
    assert torch.equal(full(x[1, 4], logits[1, 4]), out[1, 4])  # one token, no batch dimension


def test_options_reach_mono_moe(tmp_path, launches) -> None:
    write_synthetic_checkpoint(tmp_path, 1, SMALL, shards=2)
    for activations in ("fp8", "bf16"):
        layer = MoELayer.from_checkpoint(
            tmp_path, 1, "cpu", activations=activations, shared_expert="ignore"
        )
        for programmatic in (False, True):
            layer.programmatic = programmatic
            layer(torch.zeros(1, SMALL.hidden).bfloat16(), torch.zeros(1, SMALL.num_experts))
            used = {"activations": activations, "programmatic": programmatic}
            assert layer_module.mono_moe.options == used


def test_wrong_weights_are_refused_when_the_layer_is_made(full) -> None:
    with pytest.raises(ValueError, match="expert_weights_down"):
        MoELayer(LayerTensors(full.w_up, full.s_up, full.w_down[:, :, :128], full.s_down))
    good = LayerTensors(full.w_up, full.s_up, full.w_down, full.s_down)
    for options in ({"top_k": 0}, {"top_k": 17}, {"scoring_func": "tanh"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            MoELayer(good, **options)
    for router in (
        torch.zeros(FULL.num_experts, FULL.hidden + 1),
        torch.zeros(FULL.num_experts, FULL.hidden, dtype=torch.int8),
        torch.zeros(FULL.num_experts, FULL.hidden, device="meta"),
    ):
        with pytest.raises(ValueError, match=r"router_weight: expected \[256, 2048\] of floats"):
            MoELayer(replace(good, router_weight=router))
    for bad in (None, replace(good, w_up=None)):
        with pytest.raises(TypeError, match="w_up: expected a torch.Tensor"):
            MoELayer(bad)


def test_wrong_inputs_are_refused(full) -> None:
    x = torch.randn(2, FULL.hidden).bfloat16()
    logits = torch.randn(2, FULL.num_experts)
    for bad_x, bad_logits, name in (
        (x.float(), logits, "activations_in"),
        (x[:, :-128], logits, "activations_in"),
        (x[:0].float(), logits[:0], "activations_in"),
        (x, logits[:, :-1], "router_logits"),
        (x, logits[:1], "router_logits"),
        (x, logits.half(), "router_logits"),
        (x[:, 0], logits, "router_logits"),
        (x[0], logits, "router_logits"),
        (x[0, 0], logits, "hidden_states"),
        (x.to_sparse(), logits, "hidden_states"),
        (x, logits.to_sparse(), "router_logits"),
        (x.repeat(5, 1).to_sparse(), logits.repeat(5, 1), "hidden_states"),
    ):
        with pytest.raises(ValueError, match=name):
            full(bad_x, bad_logits)
    for bad in (None, 3, [1.0], x.float().numpy(), x.float().numpy()[None]):
        with pytest.raises(TypeError, match="hidden_states: expected a torch.Tensor"):
            full(bad, logits)
        with pytest.raises(TypeError, match="router_logits: expected a torch.Tensor"):
            full(x, bad)


@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 16, 21])
def test_chunks_of_eight(small, launches, tokens) -> None:
    x = torch.randn(tokens, SMALL.hidden).bfloat16()
    logits = small.router_logits(x)
    launches.clear()
    out = small(x, logits)
    assert launches == ([8] * (tokens // 8) + [tokens % 8] * (tokens % 8 > 0) or [0])
    assert torch.equal(out, expected(small, x, logits))


def test_strided_inputs(small) -> None:
    x = torch.randn(SMALL.hidden, 3, 4).bfloat16().permute(2, 1, 0)
    logits = torch.randn(4, 3, 2 * SMALL.num_experts)[..., ::2]
    flat = expected(small, x.reshape(12, -1), logits.reshape(12, -1))
    assert torch.equal(small(x, logits), flat.view(4, 3, -1))


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_views_at_any_address(full, tokens, dtype) -> None:
    memory = torch.randn(tokens, FULL.num_experts + 1).to(dtype)
    logits, x = memory[:, 1:], torch.randn(tokens, FULL.hidden + 3).bfloat16()[:, 3:]
    logits[:, :ACTIVE] += 100.0
    assert logits.data_ptr() % 16 and x.data_ptr() % 16
    want = full(x.clone(), logits.clone())
    assert want.any()
    assert torch.equal(full(x, logits), want)
    assert torch.equal(full(x.clone(), logits), want)
    assert torch.equal(full(x, logits.clone()), want)


def test_aligned_inputs_are_not_copied(full, monkeypatch) -> None:
    x, logits = torch.zeros(2, FULL.hidden).bfloat16(), torch.zeros(2, FULL.num_experts)
    monkeypatch.setattr(full, "_run", lambda *inputs: inputs)
    assert full(x, logits) == (x, logits)


def test_expanded_and_empty_inputs(small) -> None:
    x = torch.randn(1, SMALL.hidden).bfloat16().expand(5, -1)
    logits = small.router_logits(x)
    assert torch.equal(small(x, logits), expected(small, x, logits))
    for leading in ((0,), (0, 5), (2, 0), (2, 0, 3)):
        empty = small(torch.empty(*leading, SMALL.hidden).bfloat16(), torch.empty(*leading, 6))
        assert empty.shape == (*leading, SMALL.hidden)


def test_router_without_gradient(small) -> None:
    x = torch.randn(2, SMALL.hidden).bfloat16().requires_grad_()
    assert not small.router_logits(x).requires_grad


@pytest.mark.parametrize("tokens", [1, 9])
def test_no_gradient(full, tokens) -> None:
    x = torch.randn(tokens, FULL.hidden).bfloat16().requires_grad_()
    logits = torch.randn(tokens, FULL.num_experts).requires_grad_()
    assert not full(x, logits).requires_grad


def test_router(small) -> None:
    x = torch.randn(3, 2, SMALL.hidden).bfloat16()
    assert torch.equal(small.router_logits(x), x @ small.router_weight.T)
    tensors = LayerTensors(small.w_up, small.s_up, small.w_down, small.s_down)
    with pytest.raises(RuntimeError, match="no router"):
        MoELayer(tensors, top_k=2).router_logits(x)


def test_wrong_router_inputs(small) -> None:
    for bad in (torch.zeros(2, SMALL.hidden + 1), torch.zeros(()), torch.zeros(512, device="meta")):
        with pytest.raises(ValueError, match=r"hidden_states: expected \[.., 512\] on cpu, got"):
            small.router_logits(bad)
    with pytest.raises(TypeError, match="hidden_states: expected a torch.Tensor"):
        small.router_logits(None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("router_dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(small, router_dtype, dtype) -> None:
    small.router_weight = small.router_weight.to(router_dtype)
    x = torch.randn(3, SMALL.hidden).bfloat16()
    logits = small.router_logits(x)
    want = small(x, logits)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.mm(x.float(), x.float().T).dtype == dtype
        found = small.router_logits(x)
        assert found.dtype == logits.dtype == router_dtype and torch.equal(found, logits)
        assert torch.equal(small(x, found), want)
        assert torch.equal(small.router_logits(x.half()), small.router_logits(x.half().bfloat16()))


@pytest.mark.parametrize("activations", ["fp8", "bf16"])
def test_autocast_does_not_reach_mono_moe(full, monkeypatch, activations) -> None:
    monkeypatch.setattr(full, "activations", activations)
    x, logits = torch.randn(2, FULL.hidden).bfloat16(), torch.randn(2, FULL.num_experts)
    logits[:, :ACTIVE] += 100.0
    want = full(x, logits)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(full(x, logits), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("router_dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing_on_a_gpu(cuda, full, router_dtype, dtype) -> None:
    layer = copy.deepcopy(full).to(cuda)
    layer.router_weight = torch.randn(FULL.num_experts, FULL.hidden, device=cuda).to(router_dtype)
    x = torch.randn(3, FULL.hidden, device=cuda).bfloat16()
    logits = layer.router_logits(x)
    want = layer(x, logits)
    with torch.autocast("cuda", dtype=dtype):
        found = layer.router_logits(x)
        assert found.dtype == router_dtype and torch.equal(found, logits)
        assert torch.equal(layer(x, found), want)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_views_at_any_address_on_a_gpu(cuda, full, tokens) -> None:
    layer = copy.deepcopy(full).to(cuda)
    logits = torch.randn(tokens, FULL.num_experts + 1, device=cuda).bfloat16()[:, 1:]
    logits[:, :ACTIVE] += 100.0
    x = torch.randn(tokens, FULL.hidden + 3, device=cuda).bfloat16()[:, 3:]
    want = layer(x.clone(), logits.clone())
    assert want.any() and torch.equal(layer(x, logits), want)


def test_casts_leave_the_buffers_alone(small) -> None:
    before = {name: buffer.clone() for name, buffer in small.named_buffers()}
    assert set(before) == {"w_up", "s_up", "w_down", "s_down", "router_weight"}
    wrapped = torch.nn.Sequential(small, torch.nn.Linear(2, 2))
    wrapped.half().to(torch.bfloat16).float().to("cpu")
    for name, buffer in small.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer.view(torch.uint8), before[name].view(torch.uint8))
    assert wrapped[1].weight.dtype == torch.float32


def test_state_and_copies(small) -> None:
    assert set(small.state_dict()) == {"w_up", "s_up", "w_down", "s_down", "router_weight"}
    x = torch.randn(2, SMALL.hidden).bfloat16()
    logits = small.router_logits(x)
    assert torch.equal(copy.deepcopy(small)(x, logits), small(x, logits))
    assert "experts=6, hidden=512, intermediate=128, top_k=3" in repr(small)


def test_routing_comes_from_the_config_unless_given(tmp_path, launches) -> None:
    write_synthetic_checkpoint(tmp_path, 1, SMALL, shards=2)
    read = functools.partial(MoELayer.from_checkpoint, tmp_path, 1, "cpu", shared_expert="ignore")
    assert read().top_k == 3
    config = {"num_experts_per_tok": 2, "norm_topk_prob": False, "scoring_func": "sigmoid"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = read()
    assert (layer.top_k, layer.scoring_func, layer.renormalize) == (2, "sigmoid", False)
    layer = read(top_k=4, scoring_func="softmax", renormalize=True)
    assert (layer.top_k, layer.scoring_func, layer.renormalize) == (4, "softmax", True)
    (tmp_path / "config.json").unlink()
    assert read(top_k=5).top_k == 5


def test_routing_that_is_not_done_is_refused(tmp_path, launches) -> None:
    write_synthetic_checkpoint(tmp_path, 1, SMALL, shards=2)
    (tmp_path / "config.json").write_text(json.dumps({"n_group": 8}))
    with pytest.raises(CheckpointError, match="config.json: n_group: expected 0 or 1 .*, got 8"):
        MoELayer.from_checkpoint(tmp_path, 1, "cpu", shared_expert="ignore")


def test_shared_expert_is_refused_unless_ignored(tmp_path, launches) -> None:
    write_synthetic_checkpoint(tmp_path, 1, SMALL, shards=2)
    with pytest.raises(CheckpointError, match=r'mlp\.shared_expert.*shared_expert="ignore"'):
        MoELayer.from_checkpoint(tmp_path, 1, "cpu")
    for wrong in ("fuse", None, True):
        with pytest.raises(ValueError, match="shared_expert: expected 'refuse' or 'ignore', got"):
            MoELayer.from_checkpoint(tmp_path, 1, "cpu", shared_expert=wrong)


def test_device_of_the_checkpoint(tmp_path, monkeypatch) -> None:
    write_synthetic_checkpoint(tmp_path, 1, SMALL, shards=2)
    seen = []

    def load(directory, layer, device, *options):
        seen.append(device)
        raise CheckpointError("seen")

    monkeypatch.setattr(layer_module, "load_layer", load)
    for sm90, default in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(layer_module, "has_monomoe", lambda sm90=sm90: sm90)
        for device, expected in ((None, default), (0, 0), ("cpu", "cpu"), (1, 1)):
            with pytest.raises(CheckpointError, match="seen"):
                MoELayer.from_checkpoint(tmp_path, 1, device)
            assert seen[-1] == expected
