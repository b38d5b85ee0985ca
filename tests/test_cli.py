"""The command line: doctor's facts and verdicts, the demo at small size, usage errors."""

import argparse
import io
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from cute_moe import __main__ as cli
from cute_moe import demo, doctor, reference
from cute_moe.checkpoint import load_layer
from cute_moe.demo import DemoOptions, Row, run_demo
from cute_moe.host.report import KernelReport
from cute_moe.kernels.device.sizes import SMEM_LIMIT
from cute_moe.shapes import SHAPES, LayerShape
from cute_moe.synthetic import write_synthetic_checkpoint

SMALL = LayerShape(num_experts=8, hidden=512, intermediate=128, top_k=2)
SOUND = KernelReport(
    name="kernel_0",
    registers=96,
    stack_bytes=0,
    spill_bytes=0,
    smem_bytes=200_000,
    counts=Counter({"QGMMA": 24, "UTMALDG": 2}),
    notes=(),
    seconds=1.5,
)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo as on a machine without a GPU."""
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)


def printed(console: Console) -> str:
    return " ".join(console.file.getvalue().split())


def small_options(**changes) -> DemoOptions:
    return DemoOptions(tokens=(1, 2, 9), shape=SMALL, **changes)


def test_demo_writes_reads_and_checks(on_cpu, console, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    assert run_demo(small_options(), console) == 0
    text = printed(console)
    assert "The kernel cannot run here: needs an sm_90 (Hopper) GPU" in text
    assert "CPU reference" in text and "wrote a checkpoint" in text
    assert "experts=4, hidden=512, intermediate=128, top_k=2" in text
    assert "│ 9 │" in text
    assert not list(tmp_path.iterdir()), "the temporary checkpoint stayed"


def test_demo_keeps_and_reuses_a_checkpoint(on_cpu, console, tmp_path) -> None:
    kept = tmp_path / "new" / "folder"
    assert run_demo(small_options(keep=kept, layer=2), console) == 0
    assert (kept / "config.json").is_file()
    assert run_demo(small_options(checkpoint=kept, layer=2), console) == 0
    with pytest.raises(ValueError, match="not empty"):
        run_demo(small_options(keep=kept), console)
    with pytest.raises(ValueError, match="holds MoE layers 2 under"):
        run_demo(small_options(checkpoint=kept, layer=5), console)


def test_demo_says_when_disk_is_short(on_cpu, console, monkeypatch) -> None:
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"needs 0\.1 GB of disk"):
        run_demo(small_options(), console)


def test_demo_fails_on_a_wrong_result(on_cpu, console, monkeypatch) -> None:
    right = reference.moe_fp32
    monkeypatch.setattr(reference, "moe_fp32", lambda *arguments: 1.2 * right(*arguments))
    assert run_demo(small_options(), console) == 1
    assert "WRONG at M = 1, 2, 9" in printed(console)


def test_row_verdict() -> None:
    good = Row(8, 58.0, 0.005, 0.04, True, 1e8, 1.0)
    assert good.passed
    for change in ({"error_block_fp8": 0.016}, {"error_fp32": 0.08}, {"same_bits": False}):
        assert not replace(good, **change).passed
    assert not replace(good, error_fp32=float("nan")).passed


def test_gpu_table(console) -> None:
    row = Row(8, 58.0, 0.005, 0.04, True, 180e6, 1.0, microseconds=45.0)
    demo._print_gpu_table([row], 4e12, console)
    text = printed(console)
    assert "45.0" in text and "4.00" in text and "100%" in text and "4.00 TB/s read" in text
    assert "of copy" in text and "floor" not in text and "cold" not in text


def test_doctor_facts() -> None:
    found = doctor.collect()
    assert found["packages"]["torch"] and found["packages"]["nvidia-cutlass-dsl"]
    assert found["kernel_runs"] == (found["why_not"] is None)
    if not torch.cuda.is_available():
        assert found["gpus"] == [] and "needs an sm_90" in found["why_not"]


def test_doctor_command(capsys) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "kernels" not in found and found["python"]
    assert cli.main(["doctor"]) == 0
    assert "nvidia-cutlass-dsl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"stack_bytes": 16}, "local memory (stack 16 bytes)"),
        ({"counts": Counter({"LDL": 1})}, "local memory"),
        ({"smem_bytes": SMEM_LIMIT}, None),
        ({"smem_bytes": SMEM_LIMIT + 1}, "over 232448"),
        ({"smem_bytes": None}, "not found out"),
    ],
)
def test_doctor_compile_verdict(monkeypatch, capsys, console, changes, problem) -> None:
    report = replace(SOUND, **changes)
    monkeypatch.setattr(doctor.registry, "kernels", lambda: [("moe", "spec", None)])
    monkeypatch.setattr(doctor, "compile_report", lambda spec, build: report)
    assert doctor.run_doctor(True, False, console) == (problem is not None)
    assert ("BAD" if problem else "ok") in printed(console)
    assert "1: moe" in printed(console) and (problem or "") in printed(console)
    assert cli.main(["doctor", "--compile", "--json"]) == (problem is not None)
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["name"] == "moe" and kernel["symbol"] == "kernel_0"
    assert bool(kernel["problems"]) == (problem is not None)


@pytest.mark.parametrize(
    ("text", "tokens"), [("1,2,8", (1, 2, 8)), ("1-4", (1, 2, 3, 4)), ("8,1-2,64", (8, 1, 2, 64))]
)
def test_tokens(text, tokens) -> None:
    assert cli.parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text",
    ["", "0", "65", "a", "1,", "4-1", "-1", "1-", "1--2", "1-2-3", "1.5", "1_0", "1 2", "None",
     "1-999999999999", "999999999999", "\u0661"],
)  # fmt: skip
def test_wrong_tokens(text) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected numbers from 1 to 64"):
        cli.parse_tokens(text)


def test_demo_command(monkeypatch, tmp_path, capsys) -> None:
    seen = []
    monkeypatch.setattr(demo, "run_demo", lambda options, console: seen.append(options) or 0)
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--tokens", "3", "--layer", "7", "--checkpoint", "here"]) == 0
    assert seen[0] == DemoOptions() and seen[0].tokens == (1, 2, 3, 4, 5, 6, 7, 8)
    assert (seen[1].tokens, seen[1].layer, str(seen[1].checkpoint)) == ((3,), 7, "here")
    for wrong in (
        [], ["walk"], ["demo", "--tokens", "0"], ["demo", "--keep", "a", "--checkpoint", "b"]
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            cli.main(wrong)
        assert stop.value.code == 2


def test_errors_are_one_line(tmp_path, capsys) -> None:
    assert cli.main(["demo", "--checkpoint", str(tmp_path / "absent")]) == 1
    error = f"error: {tmp_path / 'absent'}: expected the folder of a checkpoint, got nothing there"
    assert capsys.readouterr().err == error + "\n"
    assert cli.main(["demo", "--checkpoint", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {tmp_path}: expected model.safetensors.index.json")
    assert "Traceback" not in captured.err
    write_synthetic_checkpoint(tmp_path, 0, replace(SMALL, hidden=256), shards=1)
    assert cli.main(["demo", "--checkpoint", str(tmp_path)]) == 1
    assert "expected 512..8192, got 256" in capsys.readouterr().err


def test_wrong_usage(capsys) -> None:
    for arguments in (
        ["--layer", "-1"], ["--layer", "1.5"], ["--layer", ""], ["--seed", "-1"], ["--seed", "x"],
        ["--seed", str(2**63)], ["--checkpoint", ""], ["--keep", ""], ["--tokens", "1-"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            cli.main(["demo", *arguments])
        assert stop.value.code == 2
        assert f"argument {arguments[0]}: expected" in capsys.readouterr().err


def test_keep_needs_a_folder_of_its_own(on_cpu, console, monkeypatch, tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ValueError, match="file: expected a folder to write into, got a file"):
        run_demo(small_options(keep=file), console)
    assert file.read_text() == "mine"
    # --keep is the way out where there is no temporary folder.
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path / "absent"))
    assert run_demo(small_options(keep=tmp_path / "kept"), console) == 0


@pytest.mark.parametrize("name", ["[/] [bold]x", ":smile:"])
def test_names_of_folders_stay_as_they_are(on_cpu, monkeypatch, capsys, tmp_path, name) -> None:
    folder = tmp_path / name
    run = demo.run_demo
    monkeypatch.setattr(
        demo, "run_demo", lambda options, console: run(replace(options, shape=SMALL), console)
    )
    assert cli.main(["demo", "--tokens", "1", "--keep", str(folder)]) == 0
    assert f"s: {folder}\n" in capsys.readouterr().out


def test_demo_says_what_it_leaves_out(on_cpu, console) -> None:
    assert run_demo(small_options(), console) == 0
    assert "the routed experts only, a shared expert is left out" in printed(console)


# A demo that prints the table of a GPU, where the time is in microseconds.
DEMO = """
import sys
from cute_moe import __main__ as cli, demo
row = demo.Row(8, 58.0, 0.005, 0.04, True, 180e6, 1.0, microseconds=45.0)
demo.run_demo = lambda options, console: demo._print_gpu_table([row], 4e12, console) or 0
sys.exit(cli.main(["demo"]))
"""
# The command line alone, which is there at once; its command prints more than a pipe holds, or
# writes so little that nothing of it leaves before the end, as doctor does with --json.
COMMAND_LINE = f"""
import runpy, sys, types
def run_doctor(compile_kernels, as_json, console):
    if as_json:
        console.file.write("figures")
    else:
        console.print("figures " * 20_000)
    return 0
sys.modules["cute_moe.doctor"] = types.SimpleNamespace(run_doctor=run_doctor)
sys.modules["cute_moe"] = types.ModuleType("cute_moe")
sys.modules["cute_moe.shapes"] = types.SimpleNamespace(DEFAULT_SHAPE="one", SHAPES=())
sys.exit(runpy.run_path({cli.__file__!r})["main"](["doctor", *sys.argv[1:]]))
"""
ASCII = ({"PYTHONIOENCODING": "ascii"},
         {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"})  # fmt: skip


def run_python(code: str, shell: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Runs `code` in a shell, its output where `shell` says."""
    unset = {"PYTHONIOENCODING", "PYTHONUTF8", "PYTHONCOERCECLOCALE", "LC_ALL", "LANG"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {shell}"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True, check=False, env=kept | environment, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("environment", ASCII, ids=["ascii", "C"])
def test_output_degrades_where_it_must_be_ascii(environment) -> None:
    done = run_python(DEMO, **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode("ascii")
    assert "us: per call, median" in text and "| 45.0 |" in text and "?" not in text


def test_output_is_whole_where_it_may_be() -> None:
    done = run_python(DEMO, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0 and "µs: per call, median" in done.stdout.decode()


@pytest.mark.parametrize(
    ("shell", "code", "complaint"),
    [
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        ("2>&-", 0, ""),
        ("| true", 1, ""),
        ("> /dev/full", 1, "error: [Errno 28] No space left on device\n"),
    ],
)
@pytest.mark.parametrize("option", ["", "--json"])
def test_output_that_nobody_takes(option, shell, code, complaint) -> None:
    done = run_python(COMMAND_LINE, f"{option} {shell}")
    assert (done.returncode, done.stderr.decode()) == (code, complaint)


def test_a_closed_stderr_draws_no_bar(monkeypatch, tmp_path) -> None:
    write_synthetic_checkpoint(tmp_path, 0, SMALL, shards=1)
    monkeypatch.setattr(sys, "stderr", None)
    assert load_layer(tmp_path, 0, shared_expert="ignore").w_up.shape[0] == SMALL.num_experts


def test_ctrl_c_is_no_traceback(monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupt)
    assert cli.main(["demo"]) == cli.INTERRUPTED


def test_the_demo_runs_the_shape_that_is_named(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(demo, "run_demo", lambda options, console: seen.append(options.shape) or 0)
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--shape", "mixtral-8x7b-tp2"]) == 0
    assert seen == [LayerShape(), LayerShape(8, 4096, 7168, 2)]


@pytest.mark.parametrize(
    "wrong", [["--shape", "other"], ["--shape", "qwen3-next", "--checkpoint", "x"]]
)
def test_shapes_that_cannot_be_shown(wrong, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", *wrong])
    assert stopped.value.code == 2 and "--shape" in capsys.readouterr().err


def test_the_cpu_has_few_experts_of_every_shape() -> None:
    for shape in SHAPES.values():
        few = demo.for_cpu(shape)
        assert replace(few, num_experts=shape.num_experts) == shape
        assert shape.top_k <= few.num_experts <= min(shape.num_experts, 2 * shape.top_k)
        nbytes = few.num_experts * few.expert_bytes
        assert nbytes <= demo.CPU_BYTES or few.num_experts == few.top_k
