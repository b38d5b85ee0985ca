"""argmin and argmax: contract on the CPU, results on the GPU (against torch)."""

import importlib
import math
import random

import pytest
import torch
from argmin_cases import DTYPES, GEOMETRIES, KINDS, make_values, random_shape, stream_shape

import cute_moe
from cute_moe.host.check import dtype_name
from cute_moe.host.launch import KernelCache
from cute_moe.kernels.argmin.kernel import build
from cute_moe.kernels.argmin.spec import plan

module = importlib.import_module("cute_moe.argmin")  # the package has the function by that name
FUNCTIONS = [(cute_moe.argmin, torch.argmin), (cute_moe.argmax, torch.argmax)]
IDS = ["argmin", "argmax"]
SHARED = torch.full((8,), 7)
both = pytest.mark.parametrize("ours, theirs", FUNCTIONS, ids=IDS)


def raised(call):
    """The exception of a call, as (type, text)."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.type, str(caught.value)


@both
def test_cpu_tensors_go_to_torch(ours, theirs) -> None:
    for kind in KINDS:
        for dtype in DTYPES:
            x = make_values((3, 5, 7), dtype, kind)
            for dim in (*range(-3, 3), None):
                for keepdim in (False, True):
                    want = theirs(x, dim, keepdim)
                    assert torch.equal(ours(x, dim, keepdim=keepdim), want)
                    out = torch.full_like(want, -1)
                    assert ours(x, dim, keepdim=keepdim, out=out) is out
                    assert torch.equal(out, want)
    assert torch.equal(ours(x), theirs(x, 1))


@both
@pytest.mark.parametrize(
    "shape, dim",
    [((3, 0), 1), ((0, 3, 0), -1), ((3, 0), None), ((0,), 0), ((3, 4), 2), ((3, 4), -3), ((), 1)],
)
def test_bad_dims_raise_what_torch_raises(ours, theirs, shape, dim) -> None:
    x = torch.empty(shape)
    assert raised(lambda: ours(x, dim)) == raised(lambda: theirs(x, dim))


@both
def test_nothing_to_do(ours, theirs) -> None:
    for shape, dim in [((0, 4), 1), ((4, 0, 3), 0), ((), 0), ((1,), 0)]:
        x = torch.zeros(shape)
        for keepdim in (False, True):
            assert torch.equal(ours(x, dim, keepdim=keepdim), theirs(x, dim, keepdim))


@both
@pytest.mark.parametrize(
    "error, name, arguments",
    [
        (TypeError, "x", dict(x=[1.0])),
        (TypeError, "dim", dict(dim=1.0)),
        (TypeError, "dim", dict(dim=True)),
        (TypeError, "keepdim", dict(keepdim=1)),
        (TypeError, "out", dict(out=[1])),
        (ValueError, "x", dict(x=torch.zeros(2, 3, dtype=torch.float64))),
        (ValueError, "x", dict(x=torch.zeros(2, 3, dtype=torch.bool))),
        (ValueError, "x", dict(x=torch.zeros(2, 3).to_sparse())),
        (ValueError, "out", dict(out=torch.full((3,), 7))),
        (ValueError, "out", dict(out=torch.full((2, 1), 7))),
        (ValueError, "out", dict(out=torch.full((2,), 7, dtype=torch.int32))),
        (ValueError, "out", dict(out=torch.full((4,), 7)[::2])),
        (ValueError, "out", dict(keepdim=True, out=torch.full((2,), 7))),
        (ValueError, "out", dict(out=torch.empty(2, dtype=torch.int64, device="meta"))),
        (ValueError, "out", dict(x=SHARED.view(torch.int32).view(2, 8), out=SHARED[1:3])),
    ],
)
def test_bad_arguments(ours, theirs, error, name, arguments) -> None:
    arguments = {"x": torch.zeros(2, 3), "dim": 1, **arguments}
    with pytest.raises(error, match=f"^{name}: expected .*got"):
        ours(**arguments)
    out = arguments.get("out")
    if isinstance(out, torch.Tensor) and out.device.type == "cpu":
        assert (out == 7).all()


@both
def test_inference_tensor_as_out_outside_of_inference_mode(ours, theirs) -> None:
    x = torch.randn(3, 4)
    with torch.inference_mode():
        out = torch.full((3,), -1)
        assert torch.equal(ours(x, 1, out=out), theirs(x, 1))
        out.fill_(-1)
    with pytest.raises(ValueError, match="^out: expected .* got an inference tensor"):
        ours(x, 1, out=out)
    assert (out == -1).all()


def compiled_function(ours):
    """A function of (x, out) that uses `ours` in three ways, compiled without graph breaks."""

    def use(x, out):
        ours(x, 0, keepdim=True, out=out)
        return ours(x, -1) + 1, ours(x, None), out

    return torch.compile(use, fullgraph=True, backend="aot_eager", dynamic=True)


def check_operators(ours, theirs, device) -> None:
    compiled = compiled_function(ours)
    for shape in [(3, 5, 7), (2, 9, 33)]:
        x = torch.randn(shape, device=device)
        out = torch.full((1, *shape[1:]), -1, device=device)
        last, flat, first = compiled(x, out)
        assert torch.equal(last, theirs(x, -1) + 1)
        assert torch.equal(flat, theirs(x))
        assert torch.equal(first, theirs(x, 0, True)) and torch.equal(out, first)
    plain = getattr(torch.ops.cute_moe, ours.__name__).default
    torch.library.opcheck(plain, (x, 1, False))
    torch.library.opcheck(plain, (x, None, True))
    out = torch.empty(2, 33, dtype=torch.int64, device=device)
    into = getattr(torch.ops.cute_moe, f"{ours.__name__}_out").default
    torch.library.opcheck(into, (x, 1, False, out))


@both
def test_operators(ours, theirs) -> None:
    check_operators(ours, theirs, "cpu")


@both
def test_fakes_check_like_the_real_ones(ours, theirs) -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3)
        assert ours(x, 0).shape == (3,) and ours(x, 0).dtype is torch.int64
        with pytest.raises(ValueError, match="^out: "):
            ours(x, 1, out=torch.empty(3, dtype=torch.int64))
        with pytest.raises(IndexError):
            ours(x, 2)


# Every dtype and both functions, but not all pairs of them: each costs four compiles.
PAIRS = [
    (torch.float32, *FUNCTIONS[0]),
    (torch.bfloat16, *FUNCTIONS[1]),
    (torch.float16, *FUNCTIONS[0]),
    (torch.int32, *FUNCTIONS[1]),
]
pairs = pytest.mark.parametrize(
    "dtype, ours, theirs", PAIRS, ids=[f"{f.__name__}-{dtype}" for dtype, f, _ in PAIRS]
)


def compare(ours, theirs, x, dim, keepdim=False, label="") -> None:
    """Our function against torch's, with a poisoned output."""
    want = theirs(x, dim, keepdim)
    out = torch.full_like(want, -7)
    ours(x, dim, keepdim=keepdim, out=out)
    if not torch.equal(out, want):
        bad = (out != want).flatten().nonzero().flatten()
        first = int(bad[0])
        got = (int(out.flatten()[first]), int(want.flatten()[first]))
        raise AssertionError(
            f"{theirs.__name__} {tuple(x.shape)} {x.dtype} dim {dim} {label}: "
            f"{len(bad)} wrong, output {first} is {got[0]}, expected {got[1]}"
        )


def shifted(shape, dtype, kind, offset):
    """Values on the GPU that begin `offset` elements past a 256-byte boundary."""
    values = make_values((math.prod(shape) + offset,), dtype, kind, "cuda")
    return values[offset:].view(shape)


@pytest.mark.gpu
@pairs
def test_random_shapes(cuda, dtype, ours, theirs) -> None:
    for _ in range(80):
        shape = random_shape(1 << 21)
        kind = random.choice(KINDS)
        offset = random.choice([0, 0, 1, 3])
        x = shifted(shape, dtype, kind, offset)
        dim = random.choice([*range(-len(shape), len(shape)), None])
        compare(ours, theirs, x, dim, random.random() < 0.5, f"{kind} offset {offset}")


@pytest.mark.gpu
@pairs
def test_random_shapes_of_the_stream_kernel(cuda, dtype, ours, theirs) -> None:
    for _ in range(8):
        shape, kind = stream_shape(dtype.itemsize), random.choice(KINDS)
        offset = random.choice([0, 1, 3])
        x = shifted(shape, dtype, kind, offset)
        compare(ours, theirs, x, 1, random.random() < 0.5, f"{kind} offset {offset}")


@pytest.mark.gpu
@pairs
def test_the_other_function_of_every_dtype(cuda, dtype, ours, theirs) -> None:
    """What PAIRS leaves out: one variant each, two of the fp32 argmax."""
    others = FUNCTIONS[ours is cute_moe.argmin]
    shapes = [(3, 70001), (20000, 67), (5, 333, 1024)]
    for shape in shapes if dtype is torch.float32 else shapes[:2]:
        for kind in KINDS:
            compare(*others, make_values(shape, dtype, kind, "cuda"), 1, label=kind)


def test_geometries_are_what_they_say() -> None:
    for dtype in DTYPES:
        for _ in range(50):
            name = dtype_name(dtype)
            assert plan(*stream_shape(dtype.itemsize), name, False, 0, 132).scan.kind == "stream"
    for (shape, dim), (kind, shared) in GEOMETRIES.items():
        made = plan(*module._sizes(torch.empty(shape), dim), "float32", False, 0, 132)
        assert (made.scan.kind, made.walk.splits > 1) == (kind, shared), (shape, dim, made)


@pytest.mark.gpu
@pairs
def test_hostile_values_in_every_geometry(cuda, dtype, ours, theirs) -> None:
    for shape, dim in GEOMETRIES:
        for kind in KINDS:
            x = make_values(shape, dtype, kind, "cuda")
            compare(ours, theirs, x, dim, label=kind)


@pytest.mark.gpu
def test_a_single_winner_anywhere(cuda) -> None:
    """Every position of a reduction in turn holds the only minimum."""
    for shape, dim in [((300, 300), 1), ((300, 300), 0), ((300, 2, 300), 2), ((2, 300, 300), 1)]:
        size = shape[dim]
        x = torch.ones(shape, device="cuda").movedim(dim, -1)
        # The reductions that x has, counted through; as many as it takes to name every place.
        index = (torch.arange(x[..., 0].numel(), device="cuda") % size).view(x.shape[:-1])
        for value in (0.0, torch.nan, -torch.inf):
            y = x.scatter(-1, index[..., None], value).movedim(-1, dim).contiguous()
            assert torch.equal(cute_moe.argmin(y, dim), index), (shape, dim, value)


@pytest.mark.gpu
def test_strided_inputs(cuda) -> None:
    x = torch.randn(33, 40, 50, device="cuda")
    for y in (x.transpose(0, 2), x[:, ::3], x.permute(1, 2, 0)[3:], x[0].expand(4, 40, 50)):
        compare(*FUNCTIONS[0], y, 1)
        compare(*FUNCTIONS[0], y, None)


@pytest.mark.gpu
def test_more_than_2_to_31_elements(cuda) -> None:
    size, place = (1 << 31) + 12345, (1 << 31) + 5
    x = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    x[place + 1] = 1
    assert int(cute_moe.argmax(x, 0)) == place + 1
    assert int(cute_moe.argmax(x[1:], 0)) == place
    x[place] = torch.nan
    assert int(cute_moe.argmax(x, 0)) == place
    for width in (3, 1025):
        rows = size // width
        matrix = x[: rows * width].view(rows, width)
        row, column = divmod(place, width)
        want = torch.zeros(width, dtype=torch.int64, device="cuda")
        want[column : column + 2] = row
        assert torch.equal(cute_moe.argmax(matrix, 0), want)
        want = torch.zeros(rows, dtype=torch.int64, device="cuda")
        want[row] = column
        assert torch.equal(cute_moe.argmax(matrix, 1), want)


@pytest.mark.gpu
def test_graph(cuda) -> None:
    """One graph of all four ways; replays see new data and leave nothing of the poison."""
    cases = [((4, 102400), 1), ((3, 999, 257), 1), ((40000, 130), 0)]
    cases.append(((5000, 4095), 0))
    xs = [torch.empty(shape, device="cuda") for shape, _ in cases]
    outs = [torch.empty_like(torch.argmin(x, dim)) for x, (_, dim) in zip(xs, cases, strict=True)]

    def launch() -> None:
        for x, out, (_, dim) in zip(xs, outs, cases, strict=True):
            cute_moe.argmin(x, dim, out=out)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        for x, out in zip(xs, outs, strict=True):
            x.copy_(make_values(x.shape, x.dtype, "ties", "cuda"))
            out.fill_(-7)
        graph.replay()
        for x, out, (_, dim) in zip(xs, outs, cases, strict=True):
            assert torch.equal(out, torch.argmin(x, dim))


@pytest.mark.gpu
def test_no_sync_and_no_gradient(cuda) -> None:
    x = torch.randn(4, 102400, device="cuda", requires_grad=True)
    out = torch.full((4,), -7, device="cuda")
    cute_moe.argmin(x, 1, out=out)
    out.fill_(-7)
    version = out._version
    torch.cuda.set_sync_debug_mode("error")
    try:
        new = cute_moe.argmin(x, 1)
        cute_moe.argmin(x, 1, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = torch.argmin(x, 1)
    assert torch.equal(new, want) and torch.equal(out, want)
    assert out._version > version and not (new.requires_grad or out.requires_grad)


@pytest.mark.gpu
def test_first_call_in_a_capture_is_refused(cuda, monkeypatch) -> None:
    monkeypatch.setattr(module, "_KERNELS", KernelCache(build))
    x = torch.randn(8, 8, device="cuda")
    with (
        pytest.raises(RuntimeError, match="before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        cute_moe.argmin(x, 1)


@pytest.mark.gpu
def test_operators_on_the_gpu(cuda) -> None:
    check_operators(*FUNCTIONS[0], "cuda")


@pytest.mark.gpu
def test_other_streams_and_threads_agree(cuda) -> None:
    x = torch.randn(5, 200_000, device="cuda")
    want = torch.argmin(x, 1)
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(cute_moe.argmin(x, 1))
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)
