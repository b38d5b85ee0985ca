"""What a kernel is compiled with: target, options, compiler stack, source digest, CUDA tools."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

from cute_moe.host.debug import debug_level

DEFAULT_ARCH = "sm_90a"
DEFAULT_OPTIONS = "--enable-tvm-ffi --opt-level 3"
SOURCE_PACKAGES = ("cute_moe", "cute_moe.host", "cute_moe.kernels")

_STACK = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
# Variables of the compiler that change the code it makes.
_COMPILER_VARIABLES = ("CUTE_DSL_COMPILER_OPT", "CUTE_DSL_LINEINFO")


def full_options(options: str, arch: str) -> str:
    """`options` with the target and what CUTE_MOE_DEBUG adds."""
    line_info = " --generate-line-info" if debug_level() >= 2 else ""
    return f"{options} --gpu-arch {arch}{line_info}"


@functools.cache
def stack_versions() -> dict[str, str]:
    """Installed version of each package that decides what the compiler makes, by name."""
    versions = {}
    for name in _STACK:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def build_environment() -> str:
    """One line per thing outside the spec and the sources that decides the compiled code."""
    facts = dict(stack_versions())
    facts["host"] = platform.machine()
    facts["debug"] = str(debug_level())
    facts.update({name: os.environ.get(name, "") for name in _COMPILER_VARIABLES})
    return "\n".join(f"{name}={value}" for name, value in facts.items())


def package_folders(packages: tuple[str, ...] = SOURCE_PACKAGES) -> dict[str, Path]:
    """Folder of each package, wherever the installation put it."""
    folders = {}
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"{name}: no such package; is cute-moe installed?")
        folders[name] = Path(next(iter(spec.submodule_search_locations)))
    return folders


def digest_sources(folders: dict[str, Path]) -> str:
    """SHA-256 over all Python sources below `folders`, keyed by dotted name.

    Each package is looked up by itself and names are dotted, so an editable install (three
    separate folders) and a wheel (nested ones) give the same digest.
    """
    sources: dict[str, bytes] = {}
    for package, folder in folders.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            sources[".".join((package, *parts))] = path.read_bytes()
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\0{len(sources[name])}\0".encode())
        digest.update(sources[name])
    return digest.hexdigest()


@functools.cache
def source_digest() -> str:
    """Digest of this process's own sources, read once: running code does not change either."""
    return digest_sources(package_folders())


def find_tool(name: str) -> str:
    """Path of a CUDA binary tool, such as "nvdisasm": PATH, CUDA_HOME, or its pip package.

    Raises RuntimeError that says how to get it.
    """
    found = shutil.which(name)
    if found:
        return found
    candidates = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable]) / "bin" / name)
    candidates.append(Path("/usr/local/cuda/bin") / name)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidates.extend(sorted(Path(folder).glob(f"*/bin/{name}")))
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise RuntimeError(
        f"{name} not found on PATH, in CUDA_HOME or in pip packages: pip install nvidia-cuda-{name}"
    )
