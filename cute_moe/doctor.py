"""What this machine has, whether the kernels run here, and what the compiler makes of them."""

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from cute_moe.host.device import device_facts, why_unsupported
from cute_moe.host.report import KernelReport, compile_report
from cute_moe.host.toolchain import DEFAULT_ARCH
from cute_moe.kernels import registry
from cute_moe.kernels.device.sizes import SMEM_LIMIT

PACKAGES = ("cute-moe", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python",
            "safetensors", "numpy")  # fmt: skip
COUNTED = ("QGMMA", "UTMALDG")


def run_doctor(compile_kernels: bool, as_json: bool, console: Console) -> int:
    """Prints facts and, if asked, a compile report; returns 1 when a kernel is unsound, else 0."""
    found = collect()
    if compile_kernels:
        found["kernels"] = compile_all()
    if as_json:
        console.file.write(json.dumps(found, indent=2) + "\n")
    else:
        _print_facts(found, console)
        if compile_kernels:
            _print_kernels(found["kernels"], console)
    return 1 if any(kernel["problems"] for kernel in found.get("kernels", [])) else 0


def collect() -> dict[str, Any]:
    """Versions, GPUs and whether the kernel runs on the current one; safe to turn into JSON."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [_gpu(index) for index in range(count)]
    reason = gpus[torch.cuda.current_device()]["why_not"] if gpus else why_unsupported(None)
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "torch_cuda": torch.version.cuda,
        "gpus": gpus,
        "kernel_runs": reason is None,
        "why_not": reason,
    }


def compile_all() -> list[dict[str, Any]]:
    """Compiles every kernel for sm_90a, GPU or not: its report as a dictionary with `problems`.

    Raises RuntimeError without the tools that read machine code.
    """
    # The compiler reads this once, when it is imported; without a GPU it has no other source.
    os.environ["CUTE_DSL_ARCH"] = os.environ.get("CUTE_DSL_ARCH") or DEFAULT_ARCH
    reports = []
    for name, spec, build in registry.kernels():
        report = compile_report(spec, build)
        counts = dict(sorted(report.counts.items()))
        facts = {**asdict(report), "name": name, "symbol": report.name, "counts": counts}
        reports.append({**facts, "problems": problems_of(report)})
    return reports


def problems_of(report: KernelReport) -> list[str]:
    """What makes a compiled kernel unfit: spills, local memory, too much shared memory."""
    found = []
    if report.spill_bytes:
        found.append(f"spills {report.spill_bytes} bytes")
    if report.uses_local_memory:
        found.append(f"uses local memory (stack {report.stack_bytes} bytes)")
    if report.smem_bytes is None:
        found.append("shared memory not found out")
    elif report.smem_bytes > SMEM_LIMIT:
        found.append(f"shared memory {report.smem_bytes} bytes, over {SMEM_LIMIT}")
    return found


def _gpu(index: int) -> dict[str, Any]:
    facts = device_facts(index)
    return {**asdict(facts), "why_not": why_unsupported(facts)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_facts(found: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False, box=None)
    for gpu in found["gpus"]:
        major, minor = gpu["capability"]
        table.add_row(
            f"GPU {gpu['index']}",
            f"{gpu['name']}, sm_{major}{minor}, {gpu['sm_count']} SMs, "
            f"L2 {gpu['l2_bytes'] >> 20} MB, {gpu['smem_optin_bytes']} bytes of shared memory "
            f"per CTA, driver {gpu['driver']}",
        )
    if not found["gpus"]:
        table.add_row("GPU", "none")
    table.add_row("python", f"{found['python']}, {found['machine']}")
    for name, version in found["packages"].items():
        table.add_row(name, version or "not installed")
    table.add_row("CUDA of torch", found["torch_cuda"] or "none (CPU build)")
    verdict = "runs here" if found["kernel_runs"] else f"cannot run here: {found['why_not']}"
    table.add_row("kernel", verdict)
    console.print(table)


def _print_kernels(kernels: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        title=f"compiled for {DEFAULT_ARCH}; bytes per thread, smem per CTA", box=box.SIMPLE
    )
    for name in ("#", "regs", "spills", "stack", "smem", *COUNTED, "seconds", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, kernel in enumerate(kernels, start=1):
        sizes = [kernel[k] for k in ("registers", "spill_bytes", "stack_bytes", "smem_bytes")]
        counted = [kernel["counts"].get(opcode, 0) for opcode in COUNTED]
        table.add_row(
            *map(str, (number, *sizes, *counted)),
            f"{kernel['seconds']:.1f}",
            "BAD" if kernel["problems"] else "ok",
        )
    console.print(table)
    for number, kernel in enumerate(kernels, start=1):
        console.print(": ".join((f"{number}", kernel["name"], *kernel["problems"])))
