"""README tables and plots, made from results files alone."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import bench
import figures
import plot
import protocol
import pytest
import report
from perf_rows import MB, example_rows, make_row

from cute_moe.shapes import DEFAULT_SHAPE

SVG = "{http://www.w3.org/2000/svg}"
META = {"gpu": "G", "clocks": "1980 MHz, 3201 MHz", "driver": "5", "commit": "abc", "date": "D"}
CONTEXT_CASES = {"empty kernel", "device copy, bytes read and written"}
FILES = sorted(report.RESULTS.glob("*.json"))


def dispatch_rows() -> list[protocol.Row]:
    shared = dict(op="dispatch", routing="none", bytes=2 * MB, experts=0, tokens=None)
    return [
        make_row("copy", 1.5, case="small", **shared),
        make_row("cute_moe", 1.8, case="small", of_floor=1.2, **shared),
        make_row("torch", 7.0, case="small", of_floor=4.667, **shared),
        make_row("copy", 150.0, case="big", **{**shared, "bytes": 200 * MB}),
        make_row("cute_moe", 151.5, case="big", of_floor=1.01, **{**shared, "bytes": 200 * MB}),
    ]


def host_rows() -> list[protocol.Row]:
    shared = dict(op="host", tokens=None, routing="none", bytes=0, experts=0, reuse_bytes=0)
    return [
        make_row("cute_moe", 3.24e6, case="first call, cold JIT", **shared),
        make_row("cute_moe", 10.92, case="call of mono_moe", **{**shared, "cache": "eager"}),
    ]


def test_moe_table() -> None:
    lines = report.moe_table(example_rows()).splitlines()
    assert lines[2:] == [
        "| uniform | 2 | 16.0 | 50.3 | 12.0 | 15.0 | 1.25 | 11.0 | 25.0 |",
    ]
    assert {line.count("|") for line in lines} == {10}
    theirs = make_row("flashinfer", 30.0, of_floor=2.5)
    with_peer = report.moe_table([*example_rows(), theirs]).splitlines()
    assert "| flashinfer µs | flashinfer / cute_moe | warm µs |" in with_peer[0]
    assert "| 15.0 | 1.25 | 30.0 | 2.00 | 11.0 |" in with_peer[2]


def other_rows(shape: str) -> list[protocol.Row]:
    return [
        make_row(name, us * m, m, of_floor=of_floor, shape=shape)
        for m in (2, 1)
        for name, us, of_floor in (
            ("cute_moe", 12.0, 1.2), ("floor", 10.0, None), ("vllm_triton", 30.0, 3.0),
        )
    ]  # fmt: skip


def test_table_of_other_shapes() -> None:
    rows = [*other_rows("qwen3-30b"), *other_rows("glm-4.5-air")]
    skewed = make_row("cute_moe", 99.0, 1, routing="skewed", shape="qwen3-30b")
    assert report.shapes_table([*rows, skewed]).splitlines() == [
        "| shape | M | experts | MB | floor µs | cute_moe µs | vllm_triton µs | cute_moe / floor |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| qwen3-30b | 1 | 16.0 | 50.3 | 10.0 | 12.0 | 30.0 | 1.20 |",
        "| qwen3-30b | 2 | 16.0 | 50.3 | 20.0 | 24.0 | 60.0 | 1.20 |",
        "| glm-4.5-air | 1 | 16.0 | 50.3 | 10.0 | 12.0 | 30.0 | 1.20 |",
        "| glm-4.5-air | 2 | 16.0 | 50.3 | 20.0 | 24.0 | 60.0 | 1.20 |",
    ]


def test_case_table() -> None:
    assert report.case_table(dispatch_rows()).splitlines() == [
        "| case | MB | cute_moe µs | copy µs | torch µs | cute_moe / copy |",
        "|---|---:|---:|---:|---:|---:|",
        "| small | 2.1 | 1.80 | 1.50 | 7.00 | 1.20 |",
        "| big | 209.7 | 151.5 | 150.0 |  | 1.01 |",
    ]


def test_host_table() -> None:
    assert report.host_table(host_rows()).splitlines()[2:] == [
        "| cute_moe: first call, cold JIT | 3.24 s | 3.24 s .. 3.24 s | 4 s |",
        "| cute_moe: call of mono_moe | 10.9 µs | 10.8 µs .. 11.1 µs | 12 µs |",
    ]


def write(folder: Path, mode: str, rows: list[protocol.Row]) -> None:
    content = protocol.to_json(META, rows)
    (folder / f"{mode}.json").write_text(protocol.to_text(content), encoding="utf-8")


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A README with marks, and results of two modes; report.py works there."""
    marks = "".join(
        f"<!-- perf:{m} -->\nold\n<!-- /perf:{m} -->\n" for m in (*report.TABLES, report.OTHERS)
    )
    (tmp_path / "README.md").write_text(f"first\n{marks}last\n", encoding="utf-8")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "PLOTS", tmp_path / "plots")
    monkeypatch.setattr(report, "TIMELINES", tmp_path / "timelines")
    write(tmp_path, "moe_qwen3.5-35b", example_rows())
    write(tmp_path, "dispatch", dispatch_rows())
    return tmp_path


def test_report_writes_and_checks(project, capsys) -> None:
    assert report.main(["--check"]) == 1
    assert "README.md: disagrees" in capsys.readouterr().out
    assert report.main([]) == 0
    readme = (project / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("first\n") and readme.endswith("last\n")
    assert "G, SM clock 1980 MHz, driver 5, commit abc, D.\n\n| routing |" in readme
    assert "| small | 2.1 | 1.80 |" in readme and "old" not in readme
    assert (project / "plots" / "moe_qwen3.5-35b.svg").exists()
    assert report.main(["--check"]) == 0
    write(project, "moe_qwen3.5-35b", [replace(row, us=99.0) for row in example_rows()])
    assert report.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "plots/moe_qwen3.5-35b.svg: disagrees" in out and "README.md: disagrees" in out


def test_other_shapes_share_a_table_and_have_a_plot_each(project) -> None:
    for shape in ("glm-4.5-air", "qwen3-30b"):
        write(project, f"moe_{shape}", other_rows(shape))
    assert report.main([]) == 0
    readme = (project / "README.md").read_text(encoding="utf-8")
    block = readme.partition("<!-- perf:moe_shapes -->\n")[2].partition("<!--")[0]
    assert block.count("G, SM clock") == 1
    assert block.index("| qwen3-30b | 1 |") < block.index("| glm-4.5-air | 2 |")
    svg = (project / "plots" / "moe_glm-4.5-air.svg").read_text(encoding="utf-8")
    assert any(text.endswith("cold weights, glm-4.5-air") for text in texts(svg))


def test_readme_without_marks(project) -> None:
    (project / "README.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="expected one <!-- perf:moe_shapes -->"):
        report.main([])


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def painted(mode: str, rows: list[protocol.Row]) -> list:
    """The axes of a plot."""
    from matplotlib.figure import Figure

    figure = Figure()
    plot.PLOTS[mode].paint(figure, "a title", rows)
    return figure.axes


def curves(axes) -> dict[str, list[tuple[float, float]]]:
    """Points of each line by its label."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def layer_rows() -> list[protocol.Row]:
    return [
        make_row(name, us * m, m, bytes=50_000_000 * m, of_floor=of_floor)
        for m in (2, 1)
        for name, us, of_floor in (
            ("torch", 300.0, 30.0 + m), ("cute_moe", 12.0, 1.2), ("floor", 10.0, None),
            ("cute_moe_programmatic", 11.0, 1.1),
        )
    ]  # fmt: skip


def test_plot_of_the_layer() -> None:
    times, ratios = painted("moe", layer_rows())
    drawn = curves(times)
    assert set(drawn) == {"floor", "cute_moe", "cute_moe_programmatic"}
    assert drawn["cute_moe"] == [(1, 12.0), (2, 24.0)] and drawn["floor"] == [(1, 10.0), (2, 20.0)]
    assert [(1, 1.2), (2, 1.2)] in curves(ratios).values()
    assert times.get_ylim()[0] == 0.0
    assert [label.get_text() for label in times.get_xticklabels()] == ["1\n50", "2\n100"]
    svg = plot.draw("moe", [*layer_rows(), make_row("floor", 1.0, cache="warm")])
    assert svg == plot.draw("moe", layer_rows()), "warm rows are not drawn, and nothing is random"
    found = texts(svg)
    assert {"floor", "cute_moe", "cute_moe_programmatic", "µs per launch"} <= set(found)
    assert "torch: 31 to 32 × floor, not drawn" in found and "torch" not in found


@pytest.mark.parametrize("mode", plot.PLOTS)
def test_no_text_is_cut_off(mode, monkeypatch) -> None:
    """Every text of the committed results' plot lies within the page."""
    from matplotlib.text import Text

    seen = []

    def svg(width: float, height: float, paint) -> str:
        def painted(figure) -> None:
            paint(figure)
            seen.append(figure)
            figure.draw_without_rendering()
            page = figure.bbox
            for text in figure.findobj(Text):
                box = text.get_window_extent()
                if text.get_visible() and text.get_text() and box.width:
                    seen.append(text.get_text())
                    assert box.x0 >= page.x0 and box.x1 <= page.x1, text
                    assert box.y0 >= page.y0 and box.y1 <= page.y1, text

        return figures.svg(width, height, painted)

    monkeypatch.setattr(plot, "svg", svg)
    rows = report.read_rows(report.RESULTS / f"{report.STEMS[mode]}.json")
    plot.draw(mode, rows)
    assert {row.contestant for row in rows} - {"empty", "torch"} <= {*seen[1:], "copy"}


def test_plot_of_cases() -> None:
    (axes,) = painted("dispatch", dispatch_rows())
    drawn = curves(axes)
    assert [x for x, _ in drawn["copy"]] == [1.0, 1.0]
    assert drawn["cute_moe"] == [(1.2, 0), (1.01, -1)] and drawn["torch"] == [(4.667, 0)]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["small\n2.10 MB, cold, copy 1.50 µs", "big\n210 MB, cold, copy 150 µs"]
    assert axes.get_xscale() == "log"
    low, high = axes.get_xlim()
    assert low < 1.0 and high > 4.667
    svg = plot.draw("dispatch", dispatch_rows())
    assert {"copy", "cute_moe", "torch", "1.80 µs", "152 µs"} <= set(texts(svg))
    with pytest.raises(ValueError, match="expected rows to draw"):
        plot.draw("dispatch", [])


@pytest.mark.parametrize(
    "value, text", [(0.0041, "0.00410"), (1.505, "1.50"), (17.66, "17.7"), (1883.2, "1883")]
)
def test_digits(value, text) -> None:
    assert plot.digits(value) == text


def test_plots_of_two_releases_say_the_same_when_their_texts_do() -> None:
    old = plot.draw("moe", layer_rows())
    new = re.sub(r"Matplotlib v[\d.]+", "Matplotlib v9.1", old)
    moved = new.replace("translate(", "translate(1")
    assert report.same(old, old) and report.same(old, moved)
    assert not report.same(old, moved.replace(">cute_moe<", ">cute<"))
    assert not report.same(old, old.replace("translate(", "translate(1"))
    assert report.same("a", "a") and not report.same("a", "b") and not report.same("a", old)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_results(path) -> None:
    content = report.read(path)
    names = {"gpu", "driver", "clocks", "versions", "commit", "date", "protocol"}
    assert names <= set(content["meta"])
    rows = protocol.from_json(content)
    assert rows and all(row.passed and row.op == mode_of(path) for row in rows)
    for row in rows:
        assert row.us > 0 and row.spread_us[0] <= row.us <= row.spread_us[1]
        assert row.bytes >= 0 and isinstance(row.experts, (int, float))
    assert json.loads(protocol.to_text(content)) == content


def mode_of(path: Path) -> str:
    """Which mode made a results file."""
    return path.stem.partition("_")[0]


def missing(mode: str, rows: list[protocol.Row]) -> list[str]:
    """What a complete results file would have besides: contestants, and ratios to the base."""
    names = {row.contestant for row in rows}
    others = {row.shape for row in rows} - {None, DEFAULT_SHAPE}
    peers = {"sglang_triton", "vllm_triton"} if others else {"flashinfer"}
    needed = {"moe": {"cute_moe", "floor"} | peers, "dispatch": {"cute_moe", "copy", "torch"},
              "argmin": {"cute_moe", "floor", "torch"}, "host": {"cute_moe"}}[mode]  # fmt: skip
    lacking = [f"no {name}" for name in sorted(needed - names)]
    if mode == "moe":
        keys = [(m, None, routing, "cold") for routing in protocol.ROUTINGS for m in range(1, 9)]
        if others:
            keys = [(m, None, "uniform", "cold") for m in (1, 2, 4, 8)]
        for name in sorted(needed & names):
            lacking += [f"no {name} {key}" for key in keys if report.find(rows, name, key) is None]
    if mode != "host":
        base = protocol.base_of(names)
        others = [row for row in rows if row.cache != "eager" and row.contestant != base]
        lacking += [
            f"no ratio: {row}"
            for row in others
            if row.of_floor is None and row.case not in CONTEXT_CASES
        ]
    return lacking


def test_what_a_results_file_may_lack() -> None:
    rows = [
        make_row(name, 12.0, m, routing=routing, of_floor=None if name == "floor" else 1.2)
        for name in ("floor", "cute_moe", "flashinfer")
        for routing in protocol.ROUTINGS
        for m in range(1, 9)
    ]
    assert missing("moe", rows) == []
    assert missing("moe", rows[1:]) == ["no floor (1, None, 'uniform', 'cold')"]
    assert missing("moe", [row for row in rows if row.contestant != "floor"])[0] == "no floor"
    (text,) = missing("moe", [*rows, make_row("torch", 90.0)])
    assert text.startswith("no ratio: Row(op='moe', contestant='torch'")
    assert missing("dispatch", dispatch_rows()) == []
    assert missing("host", []) == ["no cute_moe"]


def test_there_are_results_of_every_mode() -> None:
    assert {mode_of(path) for path in FILES} == set(bench.MODES)
    assert {path.stem for path in FILES} >= set(report.STEMS.values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_results_are_complete(path) -> None:
    assert not report.read(path)["meta"]["protocol"]["quick"]
    assert missing(mode_of(path), report.read_rows(path)) == []


def test_readme_and_plots_are_what_the_results_say() -> None:
    assert FILES, "perf/results has no results"
    for path, text in report.outputs().items():
        there = path.read_text(encoding="utf-8")
        assert report.same(there, text), f"{path}: run python perf/report.py"
