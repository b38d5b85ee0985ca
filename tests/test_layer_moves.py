"""MoELayer moved, reassigned, copied, pickled: its scratchpad follows the weights."""

import copy
import gc
import inspect
import io
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from cute_moe import alloc_scratchpad, get_scratchpad_size_bytes, moe, reference
from cute_moe import layer as layer_module
from cute_moe.checkpoint import LayerTensors
from cute_moe.layer import MoELayer

E, K, N = 4, 512, 128


def random_tensors(e: int = E, k: int = K, n: int = N) -> LayerTensors:
    def matrices(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (e, rows, columns), dtype=torch.uint8) & 0xBF  # |w| < 2
        return codes.view(reference.E4M3), torch.full((e, rows // 128, columns // 128), 0.02)

    return LayerTensors(*matrices(2 * n, k), *matrices(k, n), (0.02 * torch.randn(e, k)).bfloat16())


@pytest.fixture
def scratchpads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """The scratchpad of each launch, where launches do nothing."""
    seen = []

    signature = inspect.signature(moe.mono_moe)

    def mono_moe(*arguments, **keywords):
        given = signature.bind(*arguments, **keywords)
        seen.append(given.arguments["scratchpad"])
        return arguments[0]

    monkeypatch.setattr(layer_module, "mono_moe", mono_moe)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


@pytest.fixture
def gpus() -> Iterator[None]:
    """GPUs without memory: tensors there have shapes and devices, but no data."""
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


def call(layer: MoELayer) -> None:
    layer._run(torch.empty(1, K, dtype=torch.bfloat16), torch.empty(1, E))


def assign_state(layer: MoELayer, device: str) -> None:
    state = {name: tensor.to(device) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def assign_weights(layer: MoELayer, device: str) -> None:
    for name, tensor in layer.state_dict().items():
        setattr(layer, name, tensor.to(device))


def assign_parameters(layer: MoELayer, device: str) -> None:
    state = {
        name: torch.nn.Parameter(tensor.to(device), requires_grad=False)
        for name, tensor in layer.state_dict().items()
    }
    layer.load_state_dict(state, assign=True)


def replace_buffers(layer: MoELayer, device: str) -> None:
    for name, tensor in layer.state_dict().items():
        layer._buffers[name] = tensor.to(device)  # as torch.func.functional_call does


MOVES = {
    "to": lambda layer, device: layer.to(device),
    "to_empty": lambda layer, device: layer.to_empty(device=device),
    "load_state_dict": assign_state,
    "load_state_dict of parameters": assign_parameters,
    "assignment": assign_weights,
    "buffers": replace_buffers,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_scratchpad_follows_the_weights(scratchpads, gpus, move) -> None:
    layer = MoELayer(random_tensors(), top_k=2)
    for device in ("cuda:1", "cuda:0", "cpu", "cuda:0", "meta", "cuda:1"):
        move(layer, device)
        assert {buffer.device for buffer in layer.buffers()} == {torch.device(device)}
        call(layer)
        where = scratchpads[-1].device if scratchpads[-1] is not None else None
        assert where == (torch.device(device) if "cuda" in device else None)
        call(layer)
        assert scratchpads[-1] is scratchpads[-2], "a new one, without a move"
    assert not list(layer.parameters())
    assert set(layer.state_dict()) == {"w_up", "s_up", "w_down", "s_down", "router_weight"}


def test_scratchpad_is_not_made_in_a_capture(scratchpads, gpus, monkeypatch) -> None:
    layer = MoELayer(random_tensors(), top_k=2)
    replace_buffers(layer, "cuda:0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call the layer once"):
        call(layer)
    assert scratchpads == [None]  # of the check when the layer was made


def saved(layer: MoELayer) -> MoELayer:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, saved])
def test_copies_and_pickles_do_without_the_scratchpad(scratchpads, duplicate) -> None:
    layer = MoELayer(random_tensors(), top_k=2, scoring_func="sigmoid")
    layer.programmatic = True
    layer._scratchpad = torch.ones(64, dtype=torch.uint8)
    other = duplicate(layer)
    call(other)
    assert scratchpads[-1] is None and other._scratchpad is None
    assert layer._scratchpad is not None
    assert (other.top_k, other.scoring_func, other.programmatic) == (2, "sigmoid", True)
    for name, buffer in layer.named_buffers():
        found = getattr(other, name)
        assert found.dtype == buffer.dtype
        assert torch.equal(found.view(torch.uint8), buffer.view(torch.uint8))


@pytest.fixture
def real_scratchpads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratchpads with memory, which lies on the CPU, for layers of fake GPUs."""

    def allocate(device, **sizes):
        with unset_fake_temporarily():
            return alloc_scratchpad("cpu", **sizes)

    monkeypatch.setattr(layer_module, "alloc_scratchpad", allocate)


def test_layers_of_a_layout_share_a_scratchpad(scratchpads, gpus, real_scratchpads) -> None:
    def pad_of(layer: MoELayer) -> torch.Tensor:
        call(layer)
        return scratchpads[-1]

    layer = MoELayer(random_tensors(), top_k=2).to("cuda:0")
    pad = pad_of(layer)
    assert pad.numel() == get_scratchpad_size_bytes(
        num_experts=E, hidden=K, intermediate=N, top_k=2
    )
    others = [copy.copy(layer), copy.deepcopy(layer), MoELayer(random_tensors(e=7), top_k=2)]
    assert all(pad_of(other.to("cuda:0")) is pad for other in others)
    assert pad_of(copy.deepcopy(layer).to("cuda:1")) is not pad
    assert pad_of(MoELayer(random_tensors(), top_k=3).to("cuda:0")) is not pad
    layer.top_k = 3
    assert pad_of(layer).numel() > pad.numel()
    layer.top_k = 2
    assert pad_of(layer) is pad
    key = (torch.device("cuda:0"), pad.numel())
    assert layer_module._SHARED[key] is pad
    del layer, others, pad
    scratchpads.clear()
    gc.collect()
    assert key not in layer_module._SHARED, "kept without a layer"


def test_a_given_scratchpad_is_used_where_it_lies(scratchpads, gpus, real_scratchpads) -> None:
    sizes = dict(num_experts=E, hidden=K, intermediate=N, top_k=2)
    pad = alloc_scratchpad("cuda:0", **sizes)
    tensors = LayerTensors(*(tensor.to("cuda:0") for tensor in vars(random_tensors()).values()))
    layer = MoELayer(tensors, top_k=2, scratchpad=pad)
    for device, used in (("cuda:0", True), ("cuda:1", False), ("cpu", False), ("cuda:0", True)):
        layer.to(device)
        call(layer)
        assert (scratchpads[-1] is pad) == used, device
    call(copy.copy(layer))
    assert scratchpads[-1] is not pad


def test_a_wrong_scratchpad_is_refused() -> None:
    for wrong in (torch.zeros(64, dtype=torch.uint8), alloc_scratchpad("cpu")):
        with pytest.raises(ValueError, match="^scratchpad: expected"):
            MoELayer(random_tensors(), top_k=2, scratchpad=wrong)
    pad = alloc_scratchpad("cpu", num_experts=E, hidden=K, intermediate=N, top_k=2)
    MoELayer(random_tensors(), top_k=2, scratchpad=pad)


def test_shared_memory(scratchpads) -> None:
    layer = MoELayer(random_tensors(), top_k=2)
    before = layer.w_up.float()
    layer.share_memory()
    assert all(buffer.is_shared() for buffer in layer.buffers())
    assert layer.w_up.dtype == reference.E4M3 and torch.equal(layer.w_up.float(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("move", ["load_state_dict", "to"])
def test_to_the_cpu_and_back(cuda, move) -> None:
    layer = MoELayer(random_tensors(*full_size())).to(cuda)
    x = torch.randn(2, layer.w_down.shape[1], device=cuda).bfloat16()
    logits = layer.router_logits(x)
    want = layer(x, logits)
    MOVES[move](layer, "cpu")
    near = layer(x.cpu(), logits.cpu())
    assert reference.relative_error(near, want.cpu()) < 1.5e-2
    layer.to(cuda)
    assert torch.equal(layer(x, logits), want)


@pytest.mark.gpu
def test_layers_with_own_scratchpads_run_at_the_same_time(cuda) -> None:
    layer = MoELayer(random_tensors(*full_size())).to(cuda)
    x = torch.randn(8, layer.w_down.shape[1], device=cuda).bfloat16()
    logits = layer.router_logits(x)
    want = layer(x, logits)
    tensors = LayerTensors(*(getattr(layer, name) for name in layer.state_dict()))
    others = [MoELayer(tensors, scratchpad=alloc_scratchpad(cuda)) for _ in range(3)]
    layers = [layer, *others]
    assert len({each._scratchpad.data_ptr() for each in layers}) == len(layers)
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for each, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(each(x, logits))
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)


@pytest.mark.gpu
def test_weights_taken_from_the_cpu_run_on_the_gpu(cuda) -> None:
    layer = MoELayer(random_tensors(*full_size()))
    x = torch.randn(1, layer.w_down.shape[1], device=cuda).bfloat16()
    logits = layer.router_logits(x.cpu()).to(cuda)
    want = copy.deepcopy(layer).to(cuda)(x, logits)
    for move in (assign_state, assign_parameters, assign_weights, replace_buffers):
        moved = copy.deepcopy(layer)
        move(moved, "cuda")
        assert torch.equal(moved(x, logits), want)
        assert moved._scratchpad.device == x.device


def full_size() -> tuple[int, int, int]:
    return 256, 2048, 512
