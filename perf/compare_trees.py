"""Two checkouts measured in turn on one GPU: `perf/compare_trees.py BEFORE AFTER OUT moe ..`.

Every mode of perf/bench.py runs before, after, after, before, so that a drift meets both sides
alike, and perf/compare.py judges it at once. OUT gets the results files and what the runs printed.
The exit code is 0 if nothing is worse, 1 if something is, 2 if a run failed. The trees need not be
installed: each is put together as a package in a folder of its own, which comes first on the path.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import compare
import tool

SIDES = ("before", "after")
ORDER = ("before", "after", "after", "before")
MODES = ("moe", "dispatch", "argmin", "host")
PEERS = {"dispatch": "copy"}  # what the ratios need beside our own rows; elsewhere nothing
CHECK = """
import pathlib, sys, cute_moe, cute_moe.host, cute_moe.kernels
for package, folder in ((cute_moe, "cute_moe"), (cute_moe.host, "host"), (cute_moe.kernels, "kernels")):
    found, wanted = pathlib.Path(package.__file__).resolve().parent, pathlib.Path(sys.argv[1], folder)
    assert found == wanted.resolve(), f"{package.__name__} comes from {found}, not from {wanted}"
"""  # noqa: E501


def stage(tree: Path, folder: Path) -> dict[str, str]:
    """The environment in which `cute_moe` is that of a checkout, put together in a new `folder`.

    Raises ValueError if what Python imports there comes from anywhere else.
    """
    package = folder / "cute_moe"
    package.mkdir(parents=True)
    for source in (*sorted((tree / "cute_moe").glob("*.py")), tree / "host", tree / "kernels"):
        (package / source.name).symlink_to(source.resolve())
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUTE_MOE_CACHE_DIR": str(folder / "cache"),
    }
    environment.pop("PYTHONSAFEPATH", None)  # the scripts of perf/ import each other
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tree)],
        env=environment, cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"{tree}: expected a checkout of its own, got\n{done.stderr}")
    return environment


def bench(
    tree: Path, environment: Mapping[str, str], mode: str, results: Path, args: argparse.Namespace
) -> bool:
    """One run of a mode into `results`, its output beside that; whether it went well."""
    command = [sys.executable, str(tree / "perf" / "bench.py"), mode, "--json", str(results),
               "--peers", PEERS.get(mode, "none"), "--replays", str(args.replays)]  # fmt: skip
    if mode == "moe" and args.tokens:
        command += ["--tokens", ",".join(map(str, args.tokens))]
    started = time.monotonic()
    with results.with_suffix(".txt").open("w") as text:
        try:
            done = subprocess.run(
                command, env=environment, cwd="/", stdout=text, stderr=text, timeout=args.seconds,
                check=False,
            )  # fmt: skip
            outcome = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome = "stopped"
    print(f"{results.stem}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)
    return outcome == "exit code 0"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="perf/compare_trees.py", description=__doc__.splitlines()[0]
    )
    for side in SIDES:
        made.add_argument(side, type=Path, help=f"checkout {side} the change")
    made.add_argument("out", type=Path, help="folder for the results")
    made.add_argument("modes", nargs="+", choices=MODES)
    made.add_argument("--tokens", type=tool.parse_tokens, help="of the mode moe, such as 1,8")
    made.add_argument("--replays", type=tool.count, default=30)
    made.add_argument("--seconds", type=tool.count, default=200, help="of one run at most")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and compares; the exit code."""
    args = parse(argv)
    trees = {side: getattr(args, side).resolve() for side in SIDES}
    args.out.mkdir(parents=True, exist_ok=True)
    code = 0
    with tempfile.TemporaryDirectory(prefix="cute_moe_trees_") as folder:
        environments = {side: stage(trees[side], Path(folder, side)) for side in SIDES}
        for mode in args.modes:
            files: dict[str, list[Path]] = {side: [] for side in SIDES}
            good = True
            for side in ORDER:
                files[side].append(args.out / f"{mode}_{side}_{len(files[side]) + 1}.json")
                results = files[side][-1]
                good = bench(trees[side], environments[side], mode, results, args) and good
            if good:
                code = max(code, compare.main([str(f) for side in SIDES for f in files[side]]))
            else:
                code = 2
    return code


if __name__ == "__main__":
    sys.exit(main())
