"""What the compiler made of a kernel: registers, spills, shared memory, instructions."""

import contextlib
import io
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_moe.host.toolchain import DEFAULT_ARCH, DEFAULT_OPTIONS, find_tool, full_options

# Shared memory that sm_90 keeps for itself in every CTA; cuobjdump counts it, the limit does not.
_RESERVED_SMEM_BYTES = 1024


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel; bytes are per thread, `smem_bytes` per CTA (None: not found out).

    `counts` has the number of SASS instructions under every dotted prefix of their opcode:
    "QGMMA", "QGMMA.64x8x32", "UTMALDG.5D", "LDL", ... (an absent one counts 0). `notes` are the
    remarks of ptxas; `seconds` is the time of tracing and compiling.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    smem_bytes: int | None
    counts: Mapping[str, int]
    notes: tuple[str, ...]
    seconds: float

    @property
    def uses_local_memory(self) -> bool:
        """Whether any instruction touches per-thread memory (spills included)."""
        return self.stack_bytes > 0 or self.counts["LDL"] > 0 or self.counts["STL"] > 0


def compile_report(
    spec: Any, build: Callable[[str], Any], arch: str = DEFAULT_ARCH
) -> KernelReport:
    """Compile the kernel of `spec` for `arch` and read its machine code; needs no GPU.

    `build` as for `compile_cached`; nothing is cached. Raises RuntimeError without cuobjdump and
    nvdisasm, or when `build` makes more than one kernel.
    """
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    with tempfile.TemporaryDirectory(prefix="cute_moe_") as folder:
        options = f"{full_options(DEFAULT_OPTIONS, arch)} --keep-cubin --dump-dir {folder}"
        remarks = io.StringIO()
        started = time.perf_counter()
        with contextlib.redirect_stderr(remarks):
            compiled = build(f"{options} --remark-filter ptxas")
        seconds = time.perf_counter() - started
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.__cubin__)
        resources = parse_resources(_run(cuobjdump, "-res-usage", cubin))
        sass = _run(nvdisasm, "-c", cubin)
    if len(resources) != 1:
        names = ", ".join(resources) or "none"
        raise RuntimeError(f"build of {spec!r}: expected one kernel, got {names}")
    (name, usage), notes = next(iter(resources.items())), parse_remarks(remarks.getvalue())
    dynamic_smem = parse_launch_smem(str(compiled.ir_module))
    static_smem = max(usage["SHARED"] - _RESERVED_SMEM_BYTES, 0)
    return KernelReport(
        name=name,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        spill_bytes=parse_spill_bytes(notes),
        smem_bytes=None if dynamic_smem is None else dynamic_smem + static_smem,
        counts=count_opcodes(sass),
        notes=notes,
        seconds=seconds,
    )


def parse_resources(text: str) -> dict[str, dict[str, int]]:
    """Kernel name -> {"REG": 72, "STACK": 0, "SHARED": 1024, ...} from `cuobjdump -res-usage`."""
    resources = {}
    for name, line in re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", text):
        resources[name] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
    return resources


def count_opcodes(sass: str) -> Counter[str]:
    """Instructions under every dotted prefix of their opcode, from `nvdisasm -c`."""
    counts: Counter[str] = Counter()
    for opcode in re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass):
        parts = opcode.split(".")
        counts.update(".".join(parts[: end + 1]) for end in range(len(parts)))
    return counts


def parse_remarks(text: str) -> tuple[str, ...]:
    """The remarks of ptxas as one line each, without colours and source frames."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    blocks = re.split(r"^remark\[ptxas\]:", plain, flags=re.MULTILINE)[1:]
    frame = re.compile(r"^[> ]*\d* *\|.*$|^\s*-->.*$", flags=re.MULTILINE)
    return tuple(" ".join(frame.sub("", block).split()) for block in blocks)


def parse_spill_bytes(notes: tuple[str, ...]) -> int:
    """Bytes spilled, stores and loads together; ptxas remarks on every kernel that spills."""
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", " ".join(notes))
    return max((int(stores) + int(loads) for stores, loads in found), default=0)


def parse_launch_smem(host_code: str) -> int | None:
    """Dynamic shared memory that the generated launch code asks for, or None if unrecognised.

    The launch record is {grid, block, smem bytes (i64), stream, attributes, count}.
    """
    record = re.search(
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .*?"
        r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>\s*\n"
        r"\s*llvm\.store (%\w+), \1 : i64",
        host_code,
    )
    if record is None:
        return None
    # Value names restart in every function, so the nearest definition before the store counts.
    constants = re.findall(
        rf"{re.escape(record.group(2))} = llvm\.mlir\.constant\((\d+) : i64\)",
        host_code[: record.start()],
    )
    return int(constants[-1]) if constants else None


def _run(tool: str, *arguments: str | Path) -> str:
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
