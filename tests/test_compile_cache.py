"""The compile cache, with a real kernel and no GPU: key, memory, disk, threads, processes."""

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_cuda import fake_int32
from tiny_kernel import Builder, TinySpec, build_greedy, build_tiny, rejected

from cute_moe.host import compile as compile_module
from cute_moe.host import toolchain
from cute_moe.host.compile import compile_cached, compile_key, compile_report
from cute_moe.host.debug import debug_level

SPEC = TinySpec()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in memory and on disk."""
    monkeypatch.setenv("CUTE_MOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_module, "_LOADED", {})
    monkeypatch.setattr(compile_module, "_WARNED", set())
    return tmp_path


def forget() -> None:
    compile_module._LOADED.clear()


def test_memory_then_disk(cache: Path) -> None:
    build = Builder()
    first = compile_cached(SPEC, build)
    assert compile_cached(TinySpec(), build) is first and build.count == 1
    files = list(cache.iterdir())
    assert len(files) == 1 and files[0].name.startswith(compile_key(SPEC))
    forget()
    again = compile_cached(SPEC, build)
    assert again is not first and build.count == 1
    rejected(first)
    rejected(again)


def test_other_process_loads_without_building(cache: Path) -> None:
    compile_cached(SPEC, Builder())
    code = (
        "from cute_moe.host.compile import compile_cached\n"
        "from tiny_kernel import TinySpec\n"
        "def build(options): raise SystemExit('built again')\n"
        "print(compile_cached(TinySpec(), build))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "support")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Function" in done.stdout


def test_disk_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_MOE_CACHE_DIR", "")
    build = Builder()
    rejected(compile_cached(SPEC, build))
    forget()
    compile_cached(SPEC, build)
    assert build.count == 2 and not list(cache.iterdir())


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "garbage"])
def test_broken_file_is_compiled_again(cache: Path, damage: str) -> None:
    build = Builder()
    compile_cached(SPEC, build)
    (path,) = cache.iterdir()
    content = path.read_bytes()
    broken = {
        "cut": content[: len(content) // 2],
        "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "empty": b"",
        "garbage": b"not an object file",
    }[damage]
    path.write_bytes(broken)
    forget()
    rejected(compile_cached(SPEC, build))
    assert build.count == 2
    assert [p.read_bytes() for p in cache.iterdir()] == [content]


def test_file_of_another_key_does_not_load(cache: Path) -> None:
    build = Builder()
    compile_cached(SPEC, build)
    (path,) = cache.iterdir()
    key, wanted = compile_key(SPEC), compile_key(dataclasses.replace(SPEC, factor=5))
    path.rename(path.with_name(path.name.replace(key, wanted)))
    forget()
    other = dataclasses.replace(SPEC, factor=5)
    rejected(compile_cached(other, lambda options: build_tiny(other, options)))
    assert all(compile_module._symbol(wanted).encode() in p.read_bytes() for p in cache.iterdir())


def test_one_compile_under_concurrency(cache: Path) -> None:
    build, results = Builder(), []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        results.append(compile_cached(SPEC, build))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.count == 1 and len({id(result) for result in results}) == 1 and len(results) == 8


def test_failed_build_is_not_kept(cache: Path) -> None:
    def fail(options: str) -> None:
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        compile_cached(SPEC, fail)
    rejected(compile_cached(SPEC, Builder()))


@dataclasses.dataclass(frozen=True)
class OtherSpec:
    size: int = 64
    factor: int = 3
    smem_bytes: int = 256


def test_key_names_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {compile_key(SPEC), compile_key(dataclasses.replace(SPEC, factor=4))}
    keys |= {compile_key(OtherSpec()), compile_key(SPEC, "--opt-level 2")}
    keys |= {compile_key(SPEC, arch="sm_90")}
    with monkeypatch.context() as changed:
        changed.setenv("CUTE_DSL_COMPILER_OPT", "remarks")
        keys.add(compile_key(SPEC))
    with monkeypatch.context() as changed:
        changed.setattr(toolchain, "stack_versions", lambda: {"nvidia-cutlass-dsl": "0"})
        keys.add(compile_key(SPEC))
    with monkeypatch.context() as changed:
        changed.setattr(compile_module, "source_digest", lambda: "other")
        keys.add(compile_key(SPEC))
    with monkeypatch.context() as changed:
        changed.setenv("CUTE_MOE_DEBUG", "2")
        debug_level.cache_clear()
        keys.add(compile_key(SPEC))
    debug_level.cache_clear()
    assert len(keys) == 9
    assert compile_key(SPEC) == compile_key(TinySpec())


def test_spec_must_be_a_frozen_value() -> None:
    @dataclasses.dataclass
    class Mutable:
        size: int = 1

    @dataclasses.dataclass(frozen=True)
    class Opaque:
        thing: object = dataclasses.field(default_factory=object)

    for bad in (Mutable(), Opaque(), "text", (1, 2)):
        with pytest.raises(TypeError, match="^spec: expected"):
            compile_key(bad)


def test_digest_sees_every_source(tmp_path: Path) -> None:
    folders = toolchain.package_folders()
    assert set(folders) == {"cute_moe", "cute_moe.host", "cute_moe.kernels"}
    assert (folders["cute_moe.kernels"] / "device" / "__init__.py").is_file()
    kernels = tmp_path / "kernels" / "moe"
    kernels.mkdir(parents=True)
    (kernels / "kernel.py").write_text("a = 1\n")
    mapping = {"cute_moe.kernels": tmp_path / "kernels"}
    digests = [toolchain.digest_sources(mapping)]
    (kernels / "kernel.py").write_text("a = 2\n")
    digests.append(toolchain.digest_sources(mapping))
    (kernels / "kernel.py").rename(kernels / "other.py")
    digests.append(toolchain.digest_sources(mapping))
    assert len(set(digests)) == 3


@pytest.mark.parametrize("text", ["-1", "3", "yes", "1.5"])
def test_bad_debug_level(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_MOE_DEBUG", text)
    debug_level.cache_clear()
    with pytest.raises(ValueError, match="CUTE_MOE_DEBUG: expected an integer from 0 to 2"):
        debug_level()
    monkeypatch.undo()
    debug_level.cache_clear()


def test_log_only_when_asked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_cached(SPEC, Builder())
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("CUTE_MOE_DEBUG", "1")
    debug_level.cache_clear()
    compile_cached(SPEC, Builder())
    debug_level.cache_clear()
    assert capsys.readouterr().err.startswith("cute_moe: compiled TinySpec(")


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (lambda x: (fake_int32([63]), x, 1), ValueError, r"x.shape\[0\] .*expected to be 64"),
        (lambda x: (fake_int32([64, 1]), x, 1), ValueError, "argument #0 .*expected ndim=1"),
        (lambda x: (x, fake_int32([64], [2]), 1), ValueError, r"out.strides\[0\]"),
        (lambda x: (fake_int32([64], type_code=2), x, 1), ValueError, "expected dtype=int32"),
        (lambda x: (fake_int32([64], address=1028), x, 1), ValueError, "expected data alignment"),
        (lambda x: (x, fake_int32([64], index=1), 1), ValueError, "match x.device.index"),
        (lambda x: (x, x, 2**31), ValueError, "expected to be in int32 range"),
        (lambda x: (x, x, 1.5), TypeError, "expected int"),
        (lambda x: (None, x, 1), TypeError, "expected Tensor"),
        (lambda x: (x, x), TypeError, "Expects 3 parameters"),
    ],
)
def test_compiled_code_rejects_before_launching(
    arguments: object, kind: type[Exception], text: str
) -> None:
    function = compile_cached(SPEC, Builder())
    with pytest.raises(kind, match=text):
        function(*arguments(fake_int32([64])))


def test_report_of_a_sound_kernel() -> None:
    report = compile_report(SPEC, Builder())
    assert "tiny_kernel" in report.name and 0 < report.registers <= 64
    assert report.smem_bytes == 256
    assert report.stack_bytes == report.spill_bytes == 0 and not report.uses_local_memory
    assert report.notes == () and report.seconds > 0
    counts = report.counts
    assert counts["LDS"] == 1 and counts["STG"] == counts["STG.E"] == 1
    assert counts["BAR"] == counts["BAR.SYNC"] == 1 and counts["LDL"] == counts["QGMMA"] == 0


def test_report_of_a_spilling_kernel() -> None:
    report = compile_report(SPEC, build_greedy)
    assert report.registers <= 64 and report.stack_bytes > 0 and report.spill_bytes > 0
    assert report.counts["LDL"] > 0 and report.counts["STL"] > 0 and report.uses_local_memory
    assert len(report.notes) == 1 and "register spills" in report.notes[0]


def test_missing_tool_says_how_to_get_it() -> None:
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nosuchtool"):
        toolchain.find_tool("nosuchtool")
