"""The compile cache where its directory is foreign, damaged, missing, full or not to be had."""

import contextlib
import errno
import os
import pwd
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_kernel import Builder, TinySpec, rejected

from cute_moe.host import compile as compile_module
from cute_moe.host.compile import CACHE_VARIABLE, compile_cached

SPEC = TinySpec()
NOBODY = 65534


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in memory, and no warning given so far."""
    monkeypatch.setattr(compile_module, "_LOADED", {})
    monkeypatch.setattr(compile_module, "_WARNED", set())


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory that every user can reach, with one kernel in it."""
    folder = Path(tempfile.mkdtemp(prefix="cute_moe_test_", dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    compile_cached(SPEC, Builder())
    compile_module._LOADED.clear()
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """As a user that permissions bind, which root is not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def compile_with_warnings(*specs: TinySpec) -> list[str]:
    """Texts of the warnings while the kernels of `specs` are built, each of them once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for spec in specs or (SPEC,):
            build = Builder(spec)
            rejected(compile_cached(spec, build))
            assert build.count == 1, "not compiled, or more than once"
    assert all(w.category is RuntimeWarning for w in caught)
    return [str(w.message) for w in caught]


def only(texts: list[str], where: object) -> None:
    """Show that there was one warning, about that place."""
    assert len(texts) == 1 and texts[0].startswith(
        f"{CACHE_VARIABLE}: cannot keep compiled kernels in {where} ("
    ), texts


@pytest.mark.parametrize("damage", ["unreadable", "garbage"])
def test_foreign_directory(shared: Path, damage: str) -> None:
    """A file that is not to be read or used, in a directory that is not to be written."""
    (path,) = shared.iterdir()
    if damage == "garbage":
        path.write_bytes(b"not an object file")
    path.chmod(0o000 if damage == "unreadable" else 0o644)
    shared.chmod(0o555)
    with ordinary_user():
        texts = compile_with_warnings()
    only(texts, shared)
    assert list(shared.iterdir()) == [path]


def test_unreadable_file_of_another_user_stays(shared: Path) -> None:
    (path,) = shared.iterdir()
    found = path.read_bytes()
    path.chmod(0o000)
    shared.chmod(0o1777)
    path.rename(path.with_name(path.name.replace("-", "-0", 1)))  # as another compiler would name
    with ordinary_user():
        assert compile_with_warnings() == []
        compile_module._LOADED.clear()
        build = Builder()
        rejected(compile_cached(SPEC, build))
        assert build.count == 0, "the own file is not found beside the other user's"
    kept = {p.name: p for p in shared.iterdir()}
    assert len(kept) == 2
    other = kept.pop(path.name.replace("-", "-0", 1))
    other.chmod(0o644)
    assert other.read_bytes() == found


def test_good_file_in_a_directory_that_cannot_be_written(shared: Path) -> None:
    shared.chmod(0o555)
    build = Builder()
    with ordinary_user(), warnings.catch_warnings():
        warnings.simplefilter("error")
        rejected(compile_cached(SPEC, build))
    assert build.count == 0


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_are_what_the_umask_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    folder = tmp_path / "new" / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    before = os.umask(umask)
    try:
        compile_cached(SPEC, Builder())
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask


def test_no_home_and_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    only(compile_with_warnings(SPEC, TinySpec(factor=5)), "~/.cache/cute_moe")


def test_home_of_an_unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "~no_such_user_here/cache")
    only(compile_with_warnings(SPEC, TinySpec(factor=5)), "~no_such_user_here/cache")


@pytest.mark.parametrize("kind", ["read-only", "a file", "the root of all files"])
def test_home_that_cannot_be_written(
    shared: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    home = {"read-only": shared, "a file": shared / "file", "the root of all files": Path("/")}[
        kind
    ]
    if kind == "a file":
        home.touch()
    elif kind == "read-only":
        home.chmod(0o555)
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("HOME", "" if kind == "the root of all files" else str(home))
    with ordinary_user():
        texts = compile_with_warnings(SPEC, TinySpec(factor=5))
    only(texts, home / ".cache" / "cute_moe")


def test_directory_that_cannot_be_listed(shared: Path) -> None:
    shared.chmod(0o311)
    with ordinary_user():
        texts = compile_with_warnings(SPEC, TinySpec(factor=5))
    only(texts, shared)


@pytest.mark.parametrize("step", ["replace", "listdir"])
def test_failing_disk(shared: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for path in shared.iterdir():
        path.unlink()
    monkeypatch.setattr(compile_module.os, step, fail)
    only(compile_with_warnings(SPEC, TinySpec(factor=5)), shared)
    monkeypatch.undo()
    assert not [p for p in shared.iterdir() if p.name.startswith(".")], "left half a file"


def test_file_that_goes_while_it_is_looked_at(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = shared.iterdir()
    ghost = path.name.replace("-", "-0", 1)
    monkeypatch.setattr(compile_module.os, "listdir", lambda _: [ghost, path.name])
    build = Builder()
    rejected(compile_cached(SPEC, build))
    assert build.count == 0


def test_no_temporary_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared / "missing"))
    rejected(compile_cached(SPEC, Builder()))  # from the cache
    build = Builder(TinySpec(factor=5))
    with pytest.raises(RuntimeError, match="^TMPDIR: expected a folder that can be written"):
        compile_cached(build.spec, build)
    assert build.count == 0
