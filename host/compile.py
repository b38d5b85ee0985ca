"""Compile cache: one compile per key, kept in memory and as object files on disk."""

import contextlib
import hashlib
import os
import secrets
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from cute_moe.host.debug import log
from cute_moe.host.report import KernelReport, compile_report
from cute_moe.host.toolchain import (
    DEFAULT_ARCH,
    DEFAULT_OPTIONS,
    build_environment,
    full_options,
    source_digest,
)

__all__ = ["DEFAULT_OPTIONS", "KernelReport", "compile_cached", "compile_key", "compile_report"]

CACHE_VARIABLE = "CUTE_MOE_CACHE_DIR"
Build = Callable[[str], Any]

# The compiler keeps its state in process-wide singletons, so compiles take turns.
_LOCK = threading.RLock()
_LOADED: dict[str, Callable[..., Any]] = {}
_WARNED: set[str] = set()  # places of which it is known that nothing can be kept there


def compile_key(spec: Any, options: str = DEFAULT_OPTIONS, arch: str = DEFAULT_ARCH) -> str:
    """Hex digest of everything that decides the code of `spec`'s kernel.

    Raises TypeError unless `spec` is an instance of a frozen dataclass whose repr is its value.
    """
    kind = type(spec)
    if not (is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen):  # noqa: B009
        raise TypeError(f"spec: expected an instance of a frozen dataclass, got {spec!r}")
    text = repr(spec)
    if " at 0x" in text:
        raise TypeError(f"spec: expected fields whose repr is their value, got {text}")
    parts = [
        f"{kind.__module__}.{kind.__qualname__}",
        text,
        full_options(options, arch),
        build_environment(),
        source_digest(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def compile_cached(
    spec: Any, build: Build, *, options: str = DEFAULT_OPTIONS, arch: str = DEFAULT_ARCH
) -> Callable[..., Any]:
    """The kernel of `spec` as a function of its positional arguments, compiled at most once.

    `build(options)` returns what `cute.compile(..., options=options)` returned. Safe to call from
    many threads; needs no GPU. The directory is CUTE_MOE_CACHE_DIR (default ~/.cache/cute_moe;
    empty: nothing is kept on disk). Where it cannot be read or written, or there is no home, the
    kernel is compiled and kept in memory alone, with one RuntimeWarning.
    """
    key = compile_key(spec, options, arch)
    function = _LOADED.get(key)
    if function is not None:
        return function
    with _LOCK:
        function = _LOADED.get(key)
        if function is None:
            started = time.perf_counter()
            directory = _cache_directory()
            function = _load_from_disk(key, directory) if directory else None
            origin = "loaded"
            if function is None:
                function = _compile(key, build, full_options(options, arch), directory)
                origin = "compiled"
            log(f"{origin} {spec!r} in {time.perf_counter() - started:.2f} s")
            _LOADED[key] = function
    return function


def _cache_directory() -> Path | None:
    """Where object files are kept; None: nowhere."""
    text = os.environ.get(CACHE_VARIABLE)
    try:
        if text is None:
            return Path.home() / ".cache" / "cute_moe"
        return Path(text).expanduser() if text.strip() else None
    except RuntimeError as error:  # no such user, or one without a home
        _warn_not_kept(text or "~/.cache/cute_moe", error)
        return None


def _warn_not_kept(where: str | Path, error: Exception) -> None:
    """One warning for each place and process: the kernels live as long as the process does."""
    if str(where) in _WARNED:
        return
    _WARNED.add(str(where))
    warnings.warn(
        f"{CACHE_VARIABLE}: cannot keep compiled kernels in {where} ({error}); "
        "every process compiles them again",
        RuntimeWarning,
        stacklevel=2,
    )


def _load_from_disk(key: str, directory: Path) -> Callable[..., Any] | None:
    """The function of a sound file for `key`; broken files are removed where that is allowed."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_not_kept(directory, error)
        return None
    for name in names:
        if name.startswith(f"{key}-") and name.endswith(".o"):
            function = _load_file(key, directory / name)
            if function is not None:
                return function
    return None


def _load_file(key: str, path: Path) -> Callable[..., Any] | None:
    """The function of one file, or None; a file that cannot be read is left to its owner."""
    try:
        content = path.read_bytes()
    except OSError as error:
        log(f"{path}: {error}; compiling again")
        return None
    try:
        if path.name != _file_name(key, content):
            raise ValueError("its bytes do not match the digest in its name")
        return _load_object(key, path)
    except Exception as error:  # Whatever a stale file provokes, compiling again cures it.
        log(f"{path}: {error}; compiling again")
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _compile(key: str, build: Build, options: str, directory: Path | None) -> Callable[..., Any]:
    """Compile, write the object file under its final name in one step, and load that file.

    Loading what was written, always, leaves one call path for fresh and for cached kernels; it
    also gives a callable where the compiler itself makes none, on a machine without a GPU.
    Raises RuntimeError where there is no temporary folder; the compiler needs one, too.
    """
    with _temporary_folder() as temporary:
        compiled = build(options)
        path = Path(temporary) / "kernel.o"
        compiled.export_to_c(str(path), function_name=_symbol(key))
        if directory:
            _keep(path, directory / _file_name(key, path.read_bytes()))
        return _load_object(key, path)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when it is left."""
    try:
        return tempfile.TemporaryDirectory(prefix="cute_moe_")
    except OSError as error:
        raise RuntimeError(f"TMPDIR: expected a folder that can be written ({error})") from error


def _keep(source: Path, target: Path) -> None:
    """Copy to `target` atomically; a directory that cannot be written only costs a warning.

    Folder and file get the mode that the umask leaves: who may share the cache is up to the user.
    """
    unique = target.with_name(f".new-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(unique, "xb") as file:
                file.write(source.read_bytes())
            os.replace(unique, target)
        except OSError:
            with contextlib.suppress(OSError):
                unique.unlink()
            raise
    except OSError as error:
        _warn_not_kept(target.parent, error)


def _load_object(key: str, path: Path) -> Callable[..., Any]:
    import cutlass.cute as cute

    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    return getattr(module, _symbol(key))


def _file_name(key: str, content: bytes) -> str:
    """Key and content digest: a file that was cut short or changed no longer fits its name."""
    return f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.o"


def _symbol(key: str) -> str:
    """The function's name inside the object: with the key in it, a renamed file cannot load."""
    return f"cute_moe_{key}"
