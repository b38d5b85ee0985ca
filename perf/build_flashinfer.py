"""FlashInfer's `mono_moe` kernel as one library: `python perf/build_flashinfer.py [OUT.so]`.

Compiles the kernel's two sources from FlashInfer's wheel (given by --wheel, else fetched by pip)
with nvcc and the flags of its own build, in about a minute and without a GPU. The benchmark looks
for the library where it is built by default, or where CUTE_MOE_FLASHINFER_SO says; there it needs
apache-tvm-ffi and the driver only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

LIBRARY = Path(__file__).resolve().parent.parent / "build" / "flashinfer" / "mono_moe.so"
RELEASE = "flashinfer-python==0.7.4"
SOURCES = ("monomoe_binding.cu", "src/moe_tma.cu")
FOLDERS = ("csrc", "include", "cutlass/include", "cccl", "spdlog/include")
FLAGS = (
    "-gencode=arch=compute_90a,code=sm_90a",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
    "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3",
    "-DNDEBUG",
    "-use_fast_math",
    "-O3",
    "-std=c++17",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC",
    "-static-global-template-stub=false",
    "-cudart=static",
    "-shared",
)


def fetch(folder: Path) -> Path:
    """FlashInfer's wheel, downloaded into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, RELEASE], check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The sources and headers of the wheel, in `folder`; returns flashinfer/data."""
    wanted = tuple(f"flashinfer/data/{name}/" for name in FOLDERS)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(wanted)]
        archive.extractall(folder, names)
    return folder / "flashinfer" / "data"


def command_line(data: Path, out: Path, nvcc: str) -> list[str]:
    """nvcc's command."""
    import tvm_ffi.libinfo

    kernel = data / "csrc" / "fused_moe" / "monomoe"
    cccl = [data / "cccl" / name for name in ("libcudacxx/include", "cub", "thrust")]
    system = [data / name for name in FOLDERS if name != "cccl"]
    system += [Path(tvm_ffi.libinfo.find_include_path())]
    system += [Path(tvm_ffi.libinfo.find_dlpack_include_path())]
    includes = [f"-I{path}" for path in (kernel, kernel / "src", *cccl)]
    includes += [part for path in system for part in ("-isystem", str(path))]
    sources = [str(kernel / name) for name in SOURCES]
    return [nvcc, *FLAGS, *includes, *sources, "-o", str(out)]


def main(argv: Sequence[str] | None = None) -> int:
    """Build; the exit code is nvcc's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", default=LIBRARY)
    parser.add_argument("--wheel", type=Path, help=f"default: pip fetches {RELEASE}")
    parser.add_argument("--nvcc", default="nvcc", help="of CUDA 12.8 or newer")
    args = parser.parse_args(argv)
    console = Console()
    with tempfile.TemporaryDirectory() as name, console.status("fetching and unpacking") as status:
        folder = Path(name)
        wheel = args.wheel or fetch(folder)
        data = unpack(wheel, folder)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        status.update("compiling")
        code = subprocess.run(command_line(data, args.out, args.nvcc)).returncode
    if code == 0:
        version = subprocess.run([args.nvcc, "--version"], capture_output=True, text=True).stdout
        text = f"{wheel.name}, {version.splitlines()[-1]}\n"
        args.out.with_suffix(".txt").write_text(text, encoding="utf-8")
        console.print(f"CUTE_MOE_FLASHINFER_SO={args.out} ({args.out.stat().st_size / 1e6:.1f} MB)")
    return code


if __name__ == "__main__":
    sys.exit(main())
