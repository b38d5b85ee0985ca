"""The programs of perf/ that check the kernels, with the CPU in the GPU's place, and time-outs."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import accuracy
import moe_cases
import one_argmin
import one_dispatch
import one_launch
import pytest
import soak
import tool
import torch

import cute_moe
from cute_moe import reference
from cute_moe.kernels.argmin.spec import plan

PERF = Path(tool.__file__).resolve().parent
TOOLS = {
    "one_argmin": (one_argmin, []),
    "one_dispatch": (one_dispatch, []),
    "one_launch": (one_launch, ["--tokens", "1,2"]),
    "accuracy": (accuracy, ["--draws", "1"]),
}
SIZES = {"E": 96, "K": 256, "N": 128}  # routings of moe_cases need 78 experts


@pytest.fixture
def on_cpu(monkeypatch) -> None:
    """The layer's references and torch in place of the kernels, at small sizes."""
    monkeypatch.setattr(tool, "why_not_here", lambda: None)
    monkeypatch.setattr(tool, "device", lambda: torch.device("cpu"))
    for name, size in SIZES.items():
        monkeypatch.setattr(moe_cases, name, size)
    monkeypatch.setattr(one_argmin, "SHAPES", ((2, 30, 45),))
    monkeypatch.setattr(accuracy, "TOKENS", (1, 2))
    monkeypatch.setattr(accuracy, "TOP_KS", (2,))
    monkeypatch.setattr(cute_moe, "mono_moe", mono_moe)


def mono_moe(*inputs, scratchpad, activations="fp8"):
    layer = reference.moe_fp32 if activations == "bf16" else reference.moe_block_fp8
    return layer(*inputs)


@pytest.mark.parametrize("name", TOOLS)
def test_right_results_end_with_0(on_cpu, capsys, monkeypatch, name) -> None:
    module, arguments = TOOLS[name]
    assert module.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and not any("WRONG" in line for line in lines)


def spoil(monkeypatch, name: str) -> None:
    """Makes one function of the package wrong."""
    original = getattr(cute_moe, name)

    def wrong(*arguments, **options):
        result = original(*arguments, **options)
        first = result[0] if isinstance(result, tuple) else result
        first.view(-1)[-1] += 100
        return result

    monkeypatch.setattr(cute_moe, name, wrong)


@pytest.mark.parametrize(
    "name, function",
    [("one_argmin", "argmin"), ("one_argmin", "argmax"), ("one_dispatch", "dispatch"),
     ("one_dispatch", "moe_permute"), ("one_dispatch", "combine"), ("one_launch", "mono_moe"),
     ("accuracy", "mono_moe")],
)  # fmt: skip
def test_a_wrong_result_ends_with_1(on_cpu, capsys, monkeypatch, name, function) -> None:
    module, arguments = TOOLS[name]
    spoil(monkeypatch, function)
    assert module.main(arguments) == 1
    out = capsys.readouterr().out
    assert name == "accuracy" or "WRONG" in out


def soaked(monkeypatch, factors: list[float]) -> bool:
    """What soak says of a layer whose outputs are the right ones times these, call by call.

    A capture runs what it captures, once; a replay does nothing.
    """

    def ours(*inputs, out, scratchpad, **options):
        return out.copy_(reference.moe_block_fp8(*inputs) * factors.pop(0))

    monkeypatch.setattr(cute_moe, "mono_moe", ours)
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return soak.differing(2, moe_cases.make_weights(torch.device("cpu")), replays=3)


def test_soak_tells_other_bits_from_the_same(on_cpu, monkeypatch) -> None:
    assert soaked(monkeypatch, [1.0, 1.0]) is False
    assert soaked(monkeypatch, [1.0, 1.01]) is True
    with pytest.raises(RuntimeError, match="M = 2: the first output is wrong"):
        soaked(monkeypatch, [2.0, 2.0])


def test_the_shapes_of_one_argmin_take_both_kernels() -> None:
    plans = [
        plan(outer, reduce, inner, "float32", False, 0, 132)
        for outer, reduce, inner in one_argmin.SHAPES
    ]
    kinds = {(made.scan.kind, made.walk.splits > 1) for made in plans}
    assert {("stream", True), ("stream", False)} <= kinds and "columns" in dict(kinds)


def test_a_program_that_hangs_is_ended() -> None:
    code = f"import sys; sys.path.insert(0, {str(PERF)!r})\n"
    code += "import time, tool; tool.why_not_here = lambda: None\n"
    code += "tool.checked(tool.parser('x', 'x', 1), lambda args: time.sleep(60), [])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and "Timeout (0:00:01)!" in done.stderr


def test_programs_say_why_they_cannot_run(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (accuracy, one_argmin, one_dispatch, one_launch, soak):
        assert module.main([]) == 2
        assert "cannot run here: needs an sm_90" in capsys.readouterr().out


@pytest.mark.parametrize(
    "module, arguments",
    [(soak, ["--replays", "0"]), (soak, ["--tokens", "9"]), (accuracy, ["--draws", "-1"]),
     (one_argmin, ["--seconds", "x"]), (one_argmin, ["--dtypes", "int8"])],
)  # fmt: skip
def test_bad_arguments_are_named(capsys, module, arguments) -> None:
    with pytest.raises(SystemExit):
        module.main(arguments)
    assert f"argument {arguments[0]}: " in capsys.readouterr().err
