"""The benchmark of the layer in several shapes: which runs there are, their weights and cases."""

from dataclasses import replace

import bench
import bench_moe
import contest
import geometry
import pytest
import tool
import torch

from cute_moe import reference
from cute_moe.shapes import SHAPES, LayerShape

SHAPE = LayerShape(num_experts=32, hidden=256, intermediate=128, top_k=8)


def test_shapes_are_measured_one_by_one(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tool, "why_not_here", lambda: None)
    monkeypatch.setattr(bench, "run_mode", lambda mode, args, options, console: done.append(
        (mode, bench.stem(mode, options), options.shape)))  # fmt: skip
    done = []
    bench.main(["moe", "--shape", "qwen3-next", "--json", str(tmp_path)])
    assert done == [("moe", "moe_qwen3-next", LayerShape(512, 2048, 512, 10))]
    done.clear()
    monkeypatch.setattr(bench, "run_mode", lambda *a: done.append(bench.stem(a[0], a[2])) or 0)
    assert bench.main(["moe", "--shape", "all"]) == 0
    assert done == [f"moe_{name}" for name in SHAPES]
    done.clear()
    assert bench.main(["all"]) == 0
    assert done == ["moe_qwen3.5-35b", "dispatch", "argmin", "host"]


@pytest.mark.parametrize(
    "arguments",
    [["argmin", "--shape", "all"], ["moe", "--shape", "all", "--json", "x.json"],
     ["moe", "--shape", "other"]],
)  # fmt: skip
def test_shapes_that_make_no_sense(arguments, capsys) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "error: " in capsys.readouterr().err


def test_the_table_of_sizes_is_what_the_spec_says(monkeypatch, tmp_path) -> None:
    assert geometry.main(["--check"]) == 0, "run python perf/geometry.py"
    copy = tmp_path / "design.md"
    copy.write_text("a\n<!-- geometry -->\nold\n<!-- /geometry -->\nb\n", encoding="utf-8")
    monkeypatch.setattr(geometry, "DESIGN", copy)
    assert geometry.main(["--check"]) == 1
    assert geometry.main([]) == 0 and geometry.main(["--check"]) == 0
    lines = copy.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "a" and lines[-1] == "b"
    assert {line.count("|") for line in lines[2:-2]} == {len(SHAPES) + 2}
    copy.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="expected one <!-- geometry --> block, got 0"):
        geometry.main([])


def test_random_weights_are_finite_and_of_a_size() -> None:
    generator = torch.Generator().manual_seed(0)
    w_up, s_up, w_down, s_down = bench_moe.random_weights(SHAPE, generator)
    e, k, n = SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate
    assert (w_up.shape, w_down.shape) == ((e, 2 * n, k), (e, k, n))
    for weight, scale in ((w_up, s_up), (w_down, s_down)):
        codes = weight.view(torch.uint8)
        assert set(codes.unique().tolist()) == set(range(256)) - {0x7F, 0xFF}
        values = reference.dequantize_blocks(weight, scale)
        assert 0.015 < float(values.std()) < 0.025 and values.isfinite().all()


@pytest.mark.parametrize(
    "name, quick, cases",
    [("qwen3.5-35b", False, 24), ("qwen3.5-35b", True, 2), ("glm-4.5-air", False, 8)],
)
def test_cases_of_a_shape(name, quick, cases) -> None:
    options = contest.Options(quick=quick, shape_name=name)
    assert len(list(bench_moe.cases_of(options))) == cases
    one = list(bench_moe.cases_of(replace(options, tokens=(3,))))
    assert {tokens for _, tokens in one} == {3}
