"""A kernel that holds a number of SMs for some time and does nothing else."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from cute_moe.host.compile import compile_cached


@dataclass(frozen=True)
class OccupySpec:
    """One CTA per SM: it takes this much shared memory."""

    smem: int = 200 * 1024


@cute.kernel
def occupy_kernel(nanoseconds: Int32, smem: cutlass.Constexpr):
    SmemAllocator().allocate_array(Uint8, smem)
    start = Int64(cute.arch.globaltimer())
    now = start
    while now - start < nanoseconds:
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(200)])
        now = Int64(cute.arch.globaltimer())


@cute.jit
def launch_occupy(where: cute.Tensor, sms: Int32, nanoseconds: Int32, stream):
    occupy_kernel(nanoseconds, OccupySpec().smem).launch(
        grid=(sms, 1, 1), block=(32, 1, 1), stream=stream
    )


def build(options: str):
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    # The launch takes its device and stream from a tensor argument; the kernel does not read it.
    where = make_fake_compact_tensor(Uint8, (1,), stride_order=(0,))
    return cute.compile(launch_occupy, where, Int32(1), Int32(1), stream, options=options)


def occupy(sms: int, nanoseconds: int) -> None:
    """Hold `sms` SMs for `nanoseconds` on torch's current stream."""
    where = torch.empty(1, dtype=torch.uint8, device="cuda")
    compile_cached(OccupySpec(), build)(where, sms, nanoseconds)
