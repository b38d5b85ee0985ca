"""The demo: one MoE layer from a checkpoint, its errors against both references, its speed."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from cute_moe import reference
from cute_moe.host.device import device_facts, why_unsupported
from cute_moe.kernels.moe.spec import MAX_TOKENS
from cute_moe.layer import MoELayer
from cute_moe.shapes import LayerShape
from cute_moe.synthetic import write_synthetic_checkpoint
from cute_moe.timing import copy_bandwidth, graph_microseconds

SHARDS = 4  # files of a checkpoint
GRAPH_LAUNCHES = 24  # with as many routings: most weights come from DRAM, not from the L2 cache
GPU_REPEATS, CPU_REPEATS = 10, 1
# Relative Frobenius errors; fp8 rounding of the activations alone makes about 0.04 of the second.
MAX_ERROR_BLOCK_FP8 = 1.5e-2
MAX_ERROR_FP32 = 0.075
SPARE_DISK_BYTES = 64 << 20
CPU_BYTES = 128 << 20  # of weights that are written for the CPU, if a token's experts are no more


@dataclass(frozen=True)
class DemoOptions:
    """What to run. Without `checkpoint` a synthetic one of `shape` is written, into `keep` or a
    temporary folder that goes away again; for the CPU with few experts."""

    checkpoint: Path | None = None
    layer: int = 0
    tokens: tuple[int, ...] = tuple(range(1, MAX_TOKENS + 1))
    keep: Path | None = None
    seed: int = 0
    shape: LayerShape = field(default_factory=LayerShape)


@dataclass(frozen=True)
class Row:
    """Figures of one M; µs only on a GPU, where `experts` and `nbytes` are means over a graph."""

    tokens: int
    experts: float
    error_block_fp8: float
    error_fp32: float
    same_bits: bool
    nbytes: float
    seconds: float
    microseconds: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the errors are within bounds and every repeat gave the same bits."""
        return (
            self.same_bits
            and self.error_block_fp8 <= MAX_ERROR_BLOCK_FP8
            and self.error_fp32 <= MAX_ERROR_FP32
        )


def run_demo(options: DemoOptions, console: Console) -> int:
    """Prints the demo; returns 1 when a result is wrong, else 0.

    Raises ValueError for a checkpoint that cannot be read and OSError without disk space.
    """
    reason = _why_no_gpu()
    if reason is None:
        facts = device_facts(torch.cuda.current_device())
        console.print(f"{facts.name}, {facts.sm_count} SMs: one kernel launch per layer call")
    else:
        console.print(f"The kernel cannot run here: {reason}.")
        console.print("This is the CPU reference: the same layer, not the kernel's speed.")
        options = replace(options, shape=for_cpu(options.shape))
    layer = _load(options, "cpu" if reason else "cuda", console)
    generator = torch.Generator(layer.w_up.device).manual_seed(options.seed)
    rows = [_measure(layer, tokens, generator) for tokens in options.tokens]
    if reason is None:
        _print_gpu_table(rows, copy_bandwidth(), console)
    else:
        _print_cpu_table(rows, console)
    failed = [str(row.tokens) for row in rows if not row.passed]
    if failed:
        console.print(f"WRONG at M = {', '.join(failed)}", style="bold red")
    return 1 if failed else 0


def for_cpu(shape: LayerShape) -> LayerShape:
    """The shape with so few experts that the reference takes seconds."""
    few = min(shape.num_experts, 2 * shape.top_k, CPU_BYTES // shape.expert_bytes)
    return replace(shape, num_experts=max(few, shape.top_k))


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return why_unsupported(None)
    return why_unsupported(device_facts(torch.cuda.current_device()))


def _load(options: DemoOptions, device: str, console: Console) -> MoELayer:
    with _checkpoint(options, console) as directory:
        started = time.perf_counter()
        layer = MoELayer.from_checkpoint(directory, options.layer, device, shared_expert="ignore")
        seconds = time.perf_counter() - started
    nbytes = layer.w_up.nbytes + layer.w_down.nbytes
    console.print(
        f"read layer {options.layer}: {nbytes / 1e6:.0f} MB in {seconds:.1f} s; "
        f"{layer.extra_repr()}; the routed experts only, a shared expert is left out",
        soft_wrap=True,
    )
    return layer


@contextmanager
def _checkpoint(options: DemoOptions, console: Console) -> Iterator[Path]:
    """The directory to read, written first when the user named none."""
    if options.checkpoint is not None:
        yield options.checkpoint
        return
    with ExitStack() as stack:
        if options.keep is None:
            temporary = tempfile.TemporaryDirectory(prefix="cute_moe_demo_")
            directory = Path(stack.enter_context(temporary))
        else:
            directory = options.keep
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory}: expected a folder to write into, got a file")
        if directory.exists() and any(directory.iterdir()):
            raise ValueError(f"{directory}: not empty; to read it, name it as the checkpoint")
        directory.mkdir(parents=True, exist_ok=True)
        needed = options.shape.num_experts * options.shape.expert_bytes + SPARE_DISK_BYTES
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise OSError(
                f"{directory}: needs {needed / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free; "
                "name another folder with --keep or TMPDIR"
            )
        started = time.perf_counter()
        shards = min(SHARDS, options.shape.num_experts)
        write_synthetic_checkpoint(directory, options.layer, options.shape, options.seed, shards)
        seconds = time.perf_counter() - started
        console.print(
            f"wrote a checkpoint with random weights, {options.shape.num_experts} experts, in "
            f"{seconds:.1f} s: {directory}",
            soft_wrap=True,
        )
        yield directory


def _measure(layer: MoELayer, tokens: int, generator: torch.Generator) -> Row:
    on_gpu = layer.w_up.is_cuda
    x, logits = _inputs(layer, tokens, generator)
    weights = (layer.w_up, layer.s_up, layer.w_down, layer.s_down)
    routing = (layer.top_k, layer.scoring_func, layer.renormalize)
    started = time.perf_counter()
    out = layer(x, logits)
    seconds = time.perf_counter() - started
    # On the CPU the layer is this reference: a comparison would be of a thing with itself.
    exact = reference.moe_block_fp8(x, logits, *weights, *routing) if on_gpu else out
    meant = reference.moe_fp32(x, logits, *weights, *routing)
    repeats = GPU_REPEATS if on_gpu else CPU_REPEATS
    same_bits = all(torch.equal(layer(x, logits), out) for _ in range(repeats))
    graph_inputs = [_inputs(layer, tokens, generator) for _ in range(GRAPH_LAUNCHES)]
    timed = [logits for _, logits in graph_inputs] if on_gpu else [logits]
    experts = sum(_distinct_experts(layer, logits) for logits in timed) / len(timed)
    microseconds = None
    if on_gpu:
        launches = [lambda pair=pair: layer(*pair) for pair in graph_inputs]
        microseconds = graph_microseconds(launches)
    return Row(
        tokens=tokens,
        experts=experts,
        error_block_fp8=reference.relative_error(out, exact),
        error_fp32=reference.relative_error(out, meant),
        same_bits=same_bits,
        nbytes=experts * sum(tensor[0].nbytes for tensor in weights),
        seconds=seconds,
        microseconds=microseconds,
    )


def _inputs(
    layer: MoELayer, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal hidden states, and logits by the checkpoint's router (normal ones without it)."""
    experts, hidden, _ = layer.w_down.shape
    options: dict[str, Any] = {"generator": generator, "device": layer.w_up.device}
    x = torch.randn(tokens, hidden, **options).to(torch.bfloat16)
    if layer.router_weight is not None:
        return x, layer.router_logits(x)
    return x, torch.randn(tokens, experts, **options).to(torch.bfloat16)


def _distinct_experts(layer: MoELayer, logits: torch.Tensor) -> int:
    ids, _ = reference.route(logits, layer.top_k, layer.scoring_func, layer.renormalize)
    return len(set(ids.flatten().tolist()))


def _print_cpu_table(rows: list[Row], console: Console) -> None:
    table = Table(
        "M", "experts", "error vs block-FP8", "error vs fp32", "same bits again", "seconds (CPU)"
    )
    for row in rows:
        table.add_row(
            str(row.tokens),
            f"{row.experts:.0f}",
            f"{row.error_block_fp8:.4f}",
            f"{row.error_fp32:.4f}",
            "yes" if row.same_bits else "NO",
            f"{row.seconds:.2f}",
        )
    console.print(table)
    console.print(
        "error: |out - ref| / |ref|, Frobenius. fp32: dequantised weights, activations not "
        "rounded. The error against the block-FP8 reference is 0: it is what ran."
    )


def _print_gpu_table(rows: list[Row], copy_rate: float, console: Console) -> None:
    table = Table(
        "M", "experts", "error vs\nblock-FP8", "error vs\nfp32", "same\nbits", "µs", "MB", "TB/s",
        "of\ncopy",
    )  # fmt: skip
    for row in rows:
        rate = row.nbytes / (cast(float, row.microseconds) * 1e-6)
        table.add_row(
            str(row.tokens),
            f"{row.experts:.1f}",
            f"{row.error_block_fp8:.4f}",
            f"{row.error_fp32:.4f}",
            f"{GPU_REPEATS}/{GPU_REPEATS}" if row.same_bits else "NO",
            f"{row.microseconds:.1f}",
            f"{row.nbytes / 1e6:.1f}",
            f"{rate / 1e12:.2f}",
            f"{rate / copy_rate:.0%}",
        )
    console.print(table)
    console.print(
        "error: |out - ref| / |ref|, Frobenius. block-FP8: the kernel's arithmetic in torch. fp32: "
        "dequantised weights, activations not rounded. same bits: repeats with an equal result."
    )
    console.print(
        f"µs: per call, median; one CUDA graph of {GRAPH_LAUNCHES} calls with as many different "
        "inputs and routings, replayed. Routing, quantising and both projections are in it, the "
        "router's matrix product is not. MB: weights and scales of the distinct active experts, "
        "mean over the graph. There is one copy of the weights: an expert that two calls close to "
        "each other use may still lie in the L2 cache. of copy: TB/s as a share of a device-to-"
        f"device copy's in this run, {copy_rate / 1e12:.2f} TB/s read + written; reading alone can "
        "be faster."
    )
