"""The memory floor: a kernel that streams the weights of the active experts and does no more.

Every SM fills a shared-memory ring with 16 KB bulk copies and frees each stage after a glance at
32 of its words; the sums of those words prove afterwards that every byte range was fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
import protocol as p
import torch
from contest import Contestant
from cutlass import Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from cute_moe.host.compile import compile_cached
from cute_moe.shapes import LayerShape

CHUNK_BYTES = 16 * 1024
LANES = 32
POISON = -0x5A5A5A5B  # in the sums
SAMPLE_STRIDE = 129  # words between two sampled ones: odd, so that the lanes meet no bank twice
SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # part of the compile key


@dataclass(frozen=True)
class FloorSpec:
    """One CTA per SM with `stages` stages of 16 KB; chunks per expert in w_up and w_down."""

    grid: int = 132
    stages: int = 12
    up_chunks: int = 128
    down_chunks: int = 64
    source: str = SOURCE

    @classmethod
    def of(cls, shape: LayerShape, grid: int) -> FloorSpec:
        """For the experts of a layer. Raises ValueError where one is no whole number of chunks."""
        for name in ("up_bytes", "down_bytes"):
            if getattr(shape, name) % CHUNK_BYTES:
                raise ValueError(
                    f"shape: expected {name} of an expert in whole chunks of {CHUNK_BYTES}, "
                    f"got {getattr(shape, name)} with {shape}"
                )
        up, down = shape.up_bytes // CHUNK_BYTES, shape.down_bytes // CHUNK_BYTES
        return cls(grid=grid, up_chunks=up, down_chunks=down)


@dataclass(frozen=True)
class EmptySpec:
    """A kernel without a body, launched as the others are."""

    grid: int = 132
    source: str = SOURCE


@cute.jit
def chunk_source(c: Int32, up, down, experts: cute.Tensor, spec: cutlass.Constexpr):
    """Global memory of chunk `c`: w_up of all listed experts, then w_down of all of them."""
    ups = experts.shape[0] * spec.up_chunks
    source = up
    if c < ups:
        first = Int64(experts[c // spec.up_chunks]) * spec.up_chunks
        source = (up + (first + c % spec.up_chunks) * CHUNK_BYTES).align(128)
    else:
        first = Int64(experts[(c - ups) // spec.down_chunks]) * spec.down_chunks
        source = (down + (first + (c - ups) % spec.down_chunks) * CHUNK_BYTES).align(128)
    return source


@cute.kernel
def floor_kernel(
    w_up: cute.Tensor,
    w_down: cute.Tensor,
    experts: cute.Tensor,
    sums: cute.Tensor,
    spec: cutlass.Constexpr,
):
    """Warp 0 issues the copies of chunks cta, cta + grid, ...; warp 1 adds up samples of them."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    sm = SmemAllocator()
    ring = sm.allocate_array(Uint8, spec.stages * CHUNK_BYTES, byte_alignment=1024)
    full = sm.allocate_array(Int64, 2 * spec.stages, byte_alignment=16)
    empty = full + spec.stages
    if tid == 0:
        for s in cutlass.range_constexpr(spec.stages):
            cute.arch.mbarrier_init(full + s, 1)
            cute.arch.mbarrier_init(empty + s, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    total = experts.shape[0] * (spec.up_chunks + spec.down_chunks)
    bytes_layout = cute.make_layout(CHUNK_BYTES)
    step = Int32(0)
    if warp == 0:
        atom = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), Uint8, num_bits_per_copy=8 * CHUNK_BYTES
        )
        for c in cutlass.range(cta, total, spec.grid, unroll=1):
            source = chunk_source(c, w_up.iterator, w_down.iterator, experts, spec)
            stage = step % spec.stages
            cute.arch.mbarrier_wait(empty + stage, ((step // spec.stages) & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, CHUNK_BYTES)
                cute.copy(
                    atom,
                    cute.make_tensor(source, bytes_layout),
                    cute.make_tensor(ring + stage * CHUNK_BYTES, bytes_layout),
                    mbar_ptr=full + stage,
                )
            step = step + 1
    else:
        words = cute.make_tensor(
            cute.recast_ptr(ring, dtype=Int32), cute.make_layout(spec.stages * CHUNK_BYTES // 4)
        )
        lane = cute.arch.lane_idx()
        total_seen = Int32(0)
        for _ in cutlass.range(cta, total, spec.grid, unroll=1):
            stage = step % spec.stages
            cute.arch.mbarrier_wait(full + stage, (step // spec.stages) & 1)
            total_seen = total_seen + words[stage * (CHUNK_BYTES // 4) + lane * SAMPLE_STRIDE]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage)
            step = step + 1
        sums[cta * LANES + lane] = total_seen


@cute.kernel
def empty_kernel():
    """Nothing."""


@cute.jit
def launch_floor(
    w_up: cute.Tensor,
    w_down: cute.Tensor,
    experts: cute.Tensor,
    sums: cute.Tensor,
    stream,
    spec: cutlass.Constexpr,
):
    """One CTA per SM, launched cooperatively as the MoE kernel is."""
    floor_kernel(w_up, w_down, experts, sums, spec).launch(
        grid=(spec.grid, 1, 1),
        block=(64, 1, 1),
        stream=stream,
        cooperative=True,
        min_blocks_per_mp=1,
    )


@cute.jit
def launch_empty(where: cute.Tensor, stream, spec: cutlass.Constexpr):
    """As `launch_floor`; the tensor only names the device and the stream."""
    empty_kernel().launch(
        grid=(spec.grid, 1, 1),
        block=(64, 1, 1),
        stream=stream,
        cooperative=True,
        min_blocks_per_mp=1,
    )


def _fake(dtype, align: int, size) -> cute.Tensor:
    return make_fake_compact_tensor(dtype, (size,), stride_order=(0,), assumed_align=align)


def build_floor(spec: FloorSpec, options: str):
    """Compile the probe from fake tensors; needs no GPU."""
    weights = [_fake(Uint8, 128, cute.sym_int64()) for _ in range(2)]
    tensors = (*weights, *(_fake(Int32, 4, cute.sym_int()) for _ in range(2)))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_floor, *tensors, stream, spec, options=options)


def build_empty(spec: EmptySpec, options: str):
    """Compile the empty kernel; needs no GPU."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        launch_empty, _fake(Int32, 4, cute.sym_int()), stream, spec, options=options
    )


def floor_function(spec: FloorSpec) -> Callable[..., None]:
    """f(w_up uint8 [bytes], w_down uint8 [bytes], experts int32 [n], sums int32 [grid * 32])."""
    return compile_cached(spec, lambda options: build_floor(spec, options))


def empty_function(spec: EmptySpec) -> Callable[..., None]:
    """f(where int32 [any])."""
    return compile_cached(spec, lambda options: build_empty(spec, options))


def samples(weights: torch.Tensor, chunks: int) -> torch.Tensor:
    """The words that the probe looks at: weights [E, ..] -> int32 [E, chunks, 32]."""
    words = weights.reshape(-1).view(torch.uint8).view(torch.int32)
    words = words.view(weights.shape[0], chunks, CHUNK_BYTES // 4)
    lanes = torch.arange(LANES, device=weights.device) * SAMPLE_STRIDE
    return words[:, :, lanes]


def expected_sums(
    up: torch.Tensor, down: torch.Tensor, experts: Sequence[int], grid: int
) -> torch.Tensor:
    """What the probe leaves in `sums`, int32 [grid * 32], from the `samples` of both weights."""
    index = torch.tensor(list(experts), device=up.device)
    seen = torch.cat([up[index].flatten(0, 1), down[index].flatten(0, 1)]).long()
    padding = -len(seen) % grid
    seen = torch.nn.functional.pad(seen, (0, 0, 0, padding))
    total = seen.view(-1, grid, LANES).sum(0).flatten()
    return ((total + 2**31) % 2**32 - 2**31).to(torch.int32)


def probe_contestant(
    spec: FloorSpec,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    lists: Sequence[Sequence[int]],
    want: torch.Tensor,
) -> Contestant:
    """Launches of the probe: `pairs` are (w_up, w_down) of each, `lists` the experts.

    want: int32 [launches, grid * 32], the `expected_sums` of each.
    """
    function = floor_function(spec)
    experts = [torch.tensor(ids, dtype=torch.int32, device=want.device) for ids in lists]
    sums = torch.empty_like(want)

    def launch(i: int) -> Callable[[], object]:
        weights = [w.view(torch.uint8).view(-1) for w in pairs[i]]
        return lambda: function(*weights, experts[i], sums[i])

    def check() -> str:
        bad = int((sums != want).any(dim=1).sum())
        return f"{bad} of {len(lists)} launches saw other bytes" if bad else p.OK

    launches = [launch(i) for i in range(len(lists))]
    return Contestant(launches, lambda: sums.fill_(POISON), check)


def stream_contestant(buffers: Sequence[torch.Tensor], grid: int) -> Contestant:
    """The probe on whole buffers of one size, a multiple of CHUNK_BYTES: reads and no writes."""
    chunks = buffers[0].nbytes // CHUNK_BYTES
    up = chunks // 2
    down = chunks - up  # the halves of a buffer stand for the weights of one expert
    spec = FloorSpec(grid=grid, up_chunks=up, down_chunks=down)
    halves = [b.view(-1).view(torch.uint8).split((up * CHUNK_BYTES, down * CHUNK_BYTES))
              for b in buffers]  # fmt: skip
    seen = [(samples(first[None], up), samples(second[None], down)) for first, second in halves]
    want = torch.stack([expected_sums(*pair, [0], grid) for pair in seen])
    return probe_contestant(spec, halves, [[0]] * len(halves), want)
