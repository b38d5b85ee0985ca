"""A kernel that lets its dependents start at once, and writes its output a while later."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_moe.host.compile import compile_cached

THREADS = 256


@dataclass(frozen=True)
class LateSpec:
    """The version of the kernel, for the compile cache."""

    version: int = 1


@cute.kernel
def late_kernel(source: cute.Tensor, target: cute.Tensor, nanoseconds: Int32):
    tid, _, _ = cute.arch.thread_idx()
    cute.arch.griddepcontrol_launch_dependents()
    start = Int64(cute.arch.globaltimer())
    now = start
    while now - start < nanoseconds:
        now = Int64(cute.arch.globaltimer())
    for i in cutlass.range(tid, source.shape[0], THREADS, unroll=1):
        target[i] = source[i]


@cute.jit
def launch_late(source: cute.Tensor, target: cute.Tensor, nanoseconds: Int32, stream):
    late_kernel(source, target, nanoseconds).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def build(options: str):
    words = cute.sym_int()
    source, target = (make_fake_compact_tensor(Int32, (words,), stride_order=(0,)) for _ in "st")
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_late, source, target, Int32(1), stream, options=options)


def copy_late(source: torch.Tensor, target: torch.Tensor, nanoseconds: int) -> None:
    """Copy `source` to `target` (contiguous, whole words), after a wait, on the current stream."""
    words = [t.view(torch.uint8).view(-1).view(torch.int32) for t in (source, target)]
    compile_cached(LateSpec(), build)(*words, nanoseconds)
