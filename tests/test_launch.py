"""From a spec to a launch: warm-up rule, hot look-up, errors before compiling."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tiny_kernel import TinySpec, build_tiny

from cute_moe.host import launch as launch_module
from cute_moe.host.device import DeviceFacts
from cute_moe.host.launch import KernelCache, build_from

SPEC = TinySpec()
HOPPER = DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 232448, 50 << 20, "")
DEVICE = torch.device("cuda", 0)


class Host:
    """A pretended GPU: what the cache sees of torch, the device and the compiler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.facts, self.capturing, self.compiled, self.calls = HOPPER, False, 0, []
        self.current = 0
        cuda = launch_module.torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "device", self.switch)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(launch_module, "current_device", lambda: self.current)
        monkeypatch.setattr(launch_module, "device_facts", lambda index: self.facts)
        monkeypatch.setattr(launch_module, "compile_cached", self.compile)

    @contextlib.contextmanager
    def switch(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def compile(self, spec: object, build: object) -> object:
        self.compiled += 1
        return self.function

    def function(self, *arguments: object) -> None:
        if arguments == ("bad",):
            raise ValueError("rejected")
        self.calls.append(arguments)
        self.ran_on = self.current


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_first_call_makes_it_ready(host: Host) -> None:
    cache = KernelCache(build_tiny)
    assert cache.lookup("key") is None
    first = cache.get(SPEC, DEVICE, "key")
    assert cache.lookup("key") is None
    first(1)
    assert cache.lookup("key") == host.function
    cache.lookup("key")(2)
    assert host.calls == [(1,), (2,)]


def test_ready_per_device(host: Host) -> None:
    cache = KernelCache(build_tiny)
    cache.get(SPEC, DEVICE, "zero")()
    host.capturing = True
    assert cache.get(SPEC, DEVICE, "another key of the same spec") == host.function
    assert cache.lookup("another key of the same spec") == host.function
    with pytest.raises(RuntimeError, match="has not run on cuda:1 yet: call it once before"):
        cache.get(SPEC, torch.device("cuda", 1), "one")
    assert cache.lookup("one") is None


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("index", [0, 1])
def test_launch_switches_devices_where_it_must(host: Host, current: int, index: int) -> None:
    cache, device = KernelCache(build_tiny), torch.device("cuda", index)
    for number in range(3):
        host.current = current
        cache.launch(SPEC, device, number)
        assert host.ran_on == index and host.current == current
    host.current = 1 - current  # warm on the device, but not from here
    cache.launch(SPEC, device, 3)
    assert host.ran_on == index and host.current == 1 - current
    assert host.calls == [(0,), (1,), (2,), (3,)]
    host.capturing = True
    cache.launch(SPEC, device, 4)
    with pytest.raises(RuntimeError, match="before capturing"):
        cache.launch(TinySpec(factor=5), device, 5)


def test_builder_is_imported_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    build = build_from("module_that_comes_later")
    later = SimpleNamespace(build=lambda spec, options: (spec, options))
    monkeypatch.setitem(sys.modules, "module_that_comes_later", later)
    assert build(SPEC, "--fast") == (SPEC, "--fast")


def test_first_call_inside_a_capture(host: Host) -> None:
    cache = KernelCache(build_tiny)
    host.capturing = True
    with pytest.raises(RuntimeError, match=r"TinySpec\(.*call it once before capturing"):
        cache.get(SPEC, DEVICE, "key")
    host.capturing = False
    first = cache.get(SPEC, DEVICE, "key")
    host.capturing = True
    with pytest.raises(RuntimeError, match="call it once before capturing"):
        first(1)
    assert host.calls == [] and cache.lookup("key") is None


def test_rejected_first_call_does_not_count(host: Host) -> None:
    cache = KernelCache(build_tiny)
    with pytest.raises(ValueError, match="rejected"):
        cache.get(SPEC, DEVICE, "key")("bad")
    assert cache.lookup("key") is None


def test_unsupported_device_compiles_nothing(host: Host) -> None:
    cache = KernelCache(build_tiny)
    with pytest.raises(RuntimeError, match="cannot run on cpu: needs an sm_90"):
        cache.get(SPEC, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="needs 999999 bytes of shared memory"):
        cache.get(TinySpec(smem_bytes=999999), DEVICE)
    host.facts = DeviceFacts(0, "Ada", (8, 9), 142, 101376, 72 << 20, "")
    with pytest.raises(RuntimeError, match=r"cannot run on cuda:0: .* \(Ada\) is sm_89"):
        cache.get(SPEC, DEVICE)
    assert host.compiled == 0


def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module.torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="cannot run on cuda:0: needs an sm_90"):
        KernelCache(build_tiny).get(SPEC, DEVICE)


def test_many_threads_at_once(host: Host) -> None:
    cache = KernelCache(build_tiny)
    threads = [threading.Thread(target=lambda: cache.get(SPEC, DEVICE, "key")(1)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(host.calls) == 8 and cache.lookup("key") == host.function


@pytest.mark.gpu
def test_real_launch_and_graph(cuda: torch.device) -> None:
    cache = KernelCache(build_tiny)
    x = torch.arange(64, dtype=torch.int32, device=cuda)
    out = torch.zeros_like(x)
    refusal = pytest.raises(RuntimeError, match="call it once before capturing")
    with refusal, torch.cuda.graph(torch.cuda.CUDAGraph()):
        cache.get(SPEC, cuda, "key")
    cache.get(SPEC, cuda, "key")(x, out, 1)
    assert torch.equal(out, x * 3 + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.lookup("key")(x, out, 7)
    for shift in range(4):
        x.copy_(torch.arange(64, dtype=torch.int32, device=cuda) + shift)
        graph.replay()
        assert torch.equal(out, x * 3 + 7)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_real_launch_from_another_device() -> None:
    cache, devices = KernelCache(build_tiny), [torch.device("cuda", index) for index in (0, 1)]
    for current in devices:
        for device in (*devices, *devices):
            x = torch.arange(64, dtype=torch.int32, device=device)
            out = torch.zeros_like(x)
            with torch.cuda.device(current):
                cache.launch(SPEC, device, x, out, 1)
                assert torch.cuda.current_device() == current.index
            assert torch.equal(out, x * 3 + 1)


@pytest.mark.gpu
def test_real_launch_uses_the_current_stream(cuda: torch.device) -> None:
    function = KernelCache(build_tiny).get(SPEC, cuda)
    x = torch.zeros(64, dtype=torch.int32, device=cuda)
    out = torch.zeros_like(x)
    function(x, out, 0)
    stream = torch.cuda.Stream(cuda)
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(5)
        KernelCache(build_tiny).get(SPEC, cuda)(x, out, 0)
    stream.synchronize()
    assert torch.equal(out, torch.full_like(out, 15))
