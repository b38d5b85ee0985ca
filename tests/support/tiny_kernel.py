"""Small real kernels for the tests of the host layer: each compiles in a fraction of a second."""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator


@dataclass(frozen=True)
class TinySpec:
    """out[i] = x[i] * `factor` + add for i < `size`, one thread each; one CTA."""

    size: int = 64
    factor: int = 3
    smem_bytes: int = 256


@cute.kernel
def tiny_kernel(x: cute.Tensor, out: cute.Tensor, add: Int32, spec: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    staged = SmemAllocator().allocate_tensor(Int32, cute.make_layout(spec.size))
    staged[tid] = x[tid]
    cute.arch.sync_threads()
    out[tid] = staged[tid] * spec.factor + add


@cute.jit
def launch_tiny(x: cute.Tensor, out: cute.Tensor, add: Int32, stream, spec: cutlass.Constexpr):
    tiny_kernel(x, out, add, spec).launch(
        grid=[1, 1, 1], block=[spec.size, 1, 1], stream=stream, min_blocks_per_mp=1
    )


def build_tiny(spec: TinySpec, options: str):
    """Compile `launch_tiny`: arguments x [size] int32, out [size] int32, add."""
    vector = make_fake_compact_tensor(Int32, (spec.size,), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_tiny, vector, vector, Int32(0), stream, spec, options=options)


class Builder:
    """Builds the tiny kernel and counts how often."""

    def __init__(self, spec: TinySpec = TinySpec()) -> None:
        self.spec, self.count = spec, 0

    def __call__(self, options: str) -> object:
        self.count += 1
        return build_tiny(self.spec, options)


def rejected(function: Callable[..., object]) -> None:
    """Show that `function` is the callable kernel: a CPU tensor reaches its checks, no further."""
    x = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(x, x, 1)


@cute.kernel
def greedy_kernel(x: cute.Tensor, count: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor(count, Float32)
    total = Float32(0)
    for i in cutlass.range_constexpr(count):
        values[i] = x[tid, i] * x[i, tid]
        total += values[i]
    for i in cutlass.range_constexpr(count):
        x[tid, i] = values[i] * total


@cute.jit
def launch_greedy(x: cute.Tensor, stream, count: cutlass.Constexpr):
    greedy_kernel(x, count).launch(
        grid=[1, 1, 1], block=[1024, 1, 1], stream=stream, min_blocks_per_mp=1
    )


def build_greedy(options: str, count: int = 63):
    """Compile a kernel that needs more than its 64 registers a thread, so that it spills."""
    x = make_fake_compact_tensor(Float32, (1024, 1024), stride_order=(1, 0), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_greedy, x, stream, count, options=options)
