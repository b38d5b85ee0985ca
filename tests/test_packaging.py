"""The installed packages: list == tree, import rules, and what a wheel holds."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cute_moe.host import toolchain

ROOT = Path(__file__).resolve().parent.parent
# Folder in the checkout -> package name.
FOLDERS = {"cute_moe": "cute_moe", "host": "cute_moe.host", "kernels": "cute_moe.kernels"}
# What host and specs may import from device code: it needs the standard library only.
PLAIN = ("cute_moe.kernels.device.options", "cute_moe.kernels.device.sizes")


def sources() -> dict[str, Path]:
    """Dotted module name -> file, for every module of the three packages."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def listed_packages() -> set[str]:
    """The package list of pyproject.toml (read as text: Python 3.10 has no tomllib)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return set(ast.literal_eval(text.split("\npackages = ", 1)[1].split("]", 1)[0] + "]"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth, `from a import b` as both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_package_list_is_the_tree() -> None:
    folders = {
        name if path.name == "__init__.py" else name.rpartition(".")[0]
        for name, path in sources().items()
    }
    assert listed_packages() == folders
    for folder in folders:
        assert folder in sources(), f"{folder} has no __init__.py"


def test_cute_moe_is_imported_by_its_installed_name() -> None:
    for name, path in sources().items():
        bare = {m for m in imports(path) if within(m, "host") or within(m, "kernels")}
        assert not bare, f"{name} imports {bare}; write cute_moe.host or cute_moe.kernels"


def plain(module: str) -> bool:
    """Whether `module` is one of PLAIN, something in it or a package around it."""
    return any(within(module, name) or within(name, module) for name in PLAIN)


def test_host_knows_no_kernel_and_no_public_module() -> None:
    for name, path in sources().items():
        if within(name, "cute_moe.host"):
            own = {m for m in imports(path) if within(m, "cute_moe") and not plain(m)}
            assert all(within(m, "cute_moe.host") for m in own), f"{name} imports {own}"


def test_kernels_import_their_own_operation_and_device_code_only() -> None:
    for name, path in sources().items():
        if not within(name, "cute_moe.kernels"):
            continue
        # Modules beside the operations, such as the list of all kernels, may import any of them.
        beside = path.parent == ROOT / "kernels"
        operation = "cute_moe.kernels" if beside else ".".join(name.split(".")[:3])
        for module in imports(path):
            if within(module, "cute_moe") and module not in ("cute_moe", "cute_moe.kernels"):
                fine = within(module, operation) or within(module, "cute_moe.kernels.device")
                assert fine, f"{name} imports {module}"


def test_specs_need_the_standard_library_only() -> None:
    for name, path in sources().items():
        spec = within(name, "cute_moe.kernels") and path.name == "spec.py"
        if spec or name in PLAIN:
            tops = {m.partition(".")[0] for m in imports(path) if not (spec and plain(m))}
            assert tops <= sys.stdlib_module_names, f"{name} imports {tops}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that no stale build folder gets in."""
    copy, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(target)]
    # Without the network where this environment has the build tools itself.
    if has_build_tools():
        command.append("--no-build-isolation")
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    return path


def has_build_tools() -> bool:
    """Whether setuptools is new enough to build without an isolated environment."""
    try:
        import setuptools
    except ImportError:
        return False
    return int(setuptools.__version__.partition(".")[0]) >= 77


def test_wheel_holds_every_module_and_no_stray_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    (info,) = {name.partition("/")[0] for name in names} - {"cute_moe"}
    assert re.fullmatch(r"cute_moe-[\d.]+\.dist-info", info)
    modules = {name for name in names if name.endswith(".py")}
    expected = {
        name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        for name, path in sources().items()
    }
    assert modules == expected
    assert "cute_moe/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


def test_wheel_and_checkout_have_one_source_digest(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = (
        "import cute_moe.host.toolchain as t; print(t.__file__); "
        "print(t.package_folders()['cute_moe.kernels']); print(t.source_digest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    file, kernels, digest = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path) and Path(kernels) == tmp_path / "cute_moe/kernels"
    assert digest == toolchain.source_digest()


def test_an_edited_kernel_changes_the_digest(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    folders = {name: tmp_path / name.replace(".", "/") for name in toolchain.SOURCE_PACKAGES}
    before = toolchain.digest_sources(folders)
    assert before == toolchain.source_digest()
    edited = tmp_path / "cute_moe/kernels/device/__init__.py"
    edited.write_text(edited.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert toolchain.digest_sources(folders) != before
