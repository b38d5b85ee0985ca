"""perf/compare_trees.py: each side is measured with its own package, runs take turns."""

import json
import subprocess
import sys
from pathlib import Path

import compare_trees
import pytest

ROOT = Path(__file__).resolve().parents[1]
# What a checkout's bench.py does here: says whose package it has, and a time.
BENCH = """
import argparse, json, pathlib, cute_moe
parser = argparse.ArgumentParser()
parser.add_argument("mode")
for name in ("--json", "--peers", "--replays", "--tokens"):
    parser.add_argument(name)
given = parser.parse_args()
if given.mode == "host":
    raise SystemExit(3)
pathlib.Path(given.json).write_text(json.dumps([cute_moe.NAME, given.tokens, given.peers]))
"""


def make_tree(folder: Path, name: str) -> Path:
    for package in ("cute_moe", "host", "kernels"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(f"NAME = {name!r}\n")
    (folder / "perf").mkdir()
    (folder / "perf" / "bench.py").write_text(BENCH)
    return folder


@pytest.fixture
def trees(tmp_path) -> list[str]:
    return [str(make_tree(tmp_path / name, name)) for name in ("old", "new")]


def test_runs_take_turns_each_with_its_own_package(trees, tmp_path, monkeypatch, capsys) -> None:
    judged = []
    monkeypatch.setattr(compare_trees.compare, "main", lambda paths: judged.append(paths) or 1)
    out = tmp_path / "out"
    assert compare_trees.main([*trees, str(out), "moe", "dispatch", "--tokens", "1,8"]) == 1
    names = ["before_1", "before_2", "after_1", "after_2"]
    assert judged == [[str(out / f"{m}_{n}.json") for n in names] for m in ("moe", "dispatch")]
    for mode, rest in (("moe", ["1,8", "none"]), ("dispatch", [None, "copy"])):
        for name in names:
            side = "old" if name.startswith("before") else "new"
            assert json.loads((out / f"{mode}_{name}.json").read_text()) == [side, *rest]
    said = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    order = ["before_1", "after_1", "after_2", "before_2"]
    assert said == [f"{mode}_{name}" for mode in ("moe", "dispatch") for name in order]


def test_a_failed_run_is_not_compared(trees, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compare_trees.compare, "main", lambda paths: pytest.fail("compared"))
    assert compare_trees.main([*trees, str(tmp_path / "out"), "host"]) == 2


def test_this_checkout_can_be_staged(tmp_path) -> None:
    environment = compare_trees.stage(ROOT, tmp_path / "stage")
    code = "import cute_moe.kernels.moe.spec as s; print(s.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd="/",
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "stage")


def test_a_folder_that_is_no_checkout_is_refused(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: expected a checkout"):
        compare_trees.stage(tmp_path / "empty", tmp_path / "stage")
