"""Traces and their drawings; recording needs a GPU, so here only its wiring."""

import json
import sys
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import numpy as np
import pytest
import stamps
import timeline
import timeline_plot
import torch
from stamps import Trace

from cute_moe.kernels.moe.spec import EVENTS

TAG = "{http://www.w3.org/2000/svg}"
ORIGIN = 1_796_000_000_000_000_000  # a time as the global timer gives it: ns since 1970


def make_trace(ctas: int = 132, names=EVENTS, **changes) -> Trace:
    """Event i of CTA c at (1000 i + 32 (c % 7)) ns."""
    event, cta = np.arange(len(names)), np.arange(ctas)
    array = ORIGIN + 1000 * event[None, :] + 32 * (cta[:, None] % 7)
    return Trace(**{"names": tuple(names), "array": array, **changes})


def texts(drawing: str) -> list[str]:
    return ["".join(node.itertext()) for node in xml.fromstring(drawing).iter(f"{TAG}text")]


def panel_of(title: str) -> timeline_plot.Panel:
    (found,) = (panel for panel in timeline_plot.PANELS if panel.title.startswith(title))
    return found


def painted(trace: Trace) -> list:
    """The axes of all panels."""
    from matplotlib.figure import Figure

    figure = Figure()
    timeline_plot.paint(figure, trace)
    return figure.axes


def lines_of(axes, colour: str) -> list[tuple[float, float, float]]:
    """(row, begin, end) of the lines of a colour in a panel."""
    from matplotlib.colors import to_hex

    (patch,) = (p for p in axes.patches if to_hex(p.get_edgecolor()) == colour)
    points = patch.get_path().vertices.reshape(-1, 2, 2)
    return [(row, begin, end) for (begin, row), (end, _) in points.tolist()]


def test_times_count_from_the_earliest_event_and_zero_is_absent() -> None:
    array = np.array([[ORIGIN + 500, 0], [ORIGIN, ORIGIN + 2500]])
    trace = Trace(("start", "end"), array)
    assert trace.microseconds("start").tolist() == [0.5, 0.0]
    end = trace.microseconds("end")
    assert np.isnan(end[0]) and end[1] == 2.5
    assert np.isnan(trace.microseconds("other")).all()
    assert trace.last == 2.5 and trace.tick_ns == 500


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"names": ("start", "start")}, "names: expected different names"),
        ({"array": np.ones((4, 3), np.int64)}, r"array: expected integers \[CTAs, 2\], got int64"),
        ({"array": np.ones(2, np.int64)}, "array: expected integers"),
        ({"array": np.ones((4, 2))}, "array: expected integers .* got float64"),
        ({"array": np.zeros((4, 2), np.int64)}, "got no or negative times"),
        ({"array": np.full((4, 2), -5)}, "got no or negative times"),
        ({"array": np.zeros((0, 2), np.int64)}, "got no or negative times"),
    ],
)
def test_bad_traces_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_trace(4, **{"names": ("start", "end"), **changes})


def test_a_file_gives_the_trace_back(tmp_path) -> None:
    trace = make_trace(3, floor_us=41.5, title="M = 8", meta={"gpu": "G"})
    trace.array[1, 2] = 0
    path = tmp_path / "a.json"
    path.write_text(stamps.to_json(trace), encoding="utf-8")
    got = stamps.read(path)
    assert (got.names, got.floor_us, got.title) == (trace.names, 41.5, "M = 8")
    assert got.meta == {"gpu": "G"} and got.array.max() < 1e6, "no time of day"
    for name in EVENTS:
        assert np.array_equal(got.microseconds(name), trace.microseconds(name), equal_nan=True)
    assert np.isnan(got.microseconds(EVENTS[2])[1])
    assert stamps.to_json(got) == path.read_text(encoding="utf-8")


def test_a_file_with_names_and_array_only_is_enough(tmp_path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"names": ["start"], "array": [[7]]}), encoding="utf-8")
    got = stamps.read(path)
    assert got.floor_us is None and got.title == "run"
    path.write_text(json.dumps({"names": ["start"]}), encoding="utf-8")
    with pytest.raises(KeyError, match="array"):
        stamps.read(path)
    path.write_text("a,b\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"run\.json: expected a trace as JSON"):
        stamps.read(path)


def test_table_counts_the_ctas_of_each_event() -> None:
    array = ORIGIN + np.array([[0, 2000], [100, 4000], [300, -ORIGIN]])
    assert timeline.table(Trace(("start", "end"), array)) == (
        "| event | CTAs | min µs | median µs | max µs |\n"
        "|---|---:|---:|---:|---:|\n"
        "| start | 3 | 0.00 | 0.10 | 0.30 |\n"
        "| end | 2 | 2.00 | 3.00 | 4.00 |\n"
    )


def test_table_of_an_event_that_never_happened() -> None:
    trace = Trace(("start", "end"), np.array([[ORIGIN, 0]]))
    assert "| end | 0 |  |  |  |\n" in timeline.table(trace)


def test_panels_know_the_events_of_the_kernel_and_no_others() -> None:
    known = {phase.event for panel in timeline_plot.PANELS for phase in panel.phases}
    assert known == set(EVENTS)


def test_drawing_is_the_same_every_time_and_fits_a_page() -> None:
    drawing = timeline_plot.draw(make_trace(floor_us=12.0))
    assert drawing == timeline_plot.draw(make_trace(floor_us=12.0))
    root = xml.fromstring(drawing)
    assert 0 < float(root.get("width").removesuffix("pt")) * 96 / 72 < 1000
    assert "nan" not in drawing and "inf" not in drawing
    found = texts(drawing)
    assert {panel.title for panel in timeline_plot.PANELS} <= set(found)
    assert any("floor, 12.0 µs" in text for text in found)


def test_a_phase_has_a_line_for_every_cta_from_its_begin_to_its_end() -> None:
    array = ORIGIN + np.array([[0, 1000, 4000], [0, 2000, 4000]])
    producer, *_ = painted(Trace(("start", "first_copy", "up_issued"), array))
    _, first_copy, up_issued, *_ = panel_of("producer").phases
    assert lines_of(producer, first_copy.colour) == [(0, 0.0, 1.0), (1, 0.0, 2.0)]
    assert lines_of(producer, up_issued.colour) == [(0, 1.0, 4.0), (1, 2.0, 4.0)]


def test_a_phase_begins_at_the_latest_event_before_it_that_happened() -> None:
    names = ("start", "first_copy", "up_issued", "down_issued")
    array = np.array([[100, 300, 0, 900], [100, 700, 600, 900]])
    times = timeline_plot.phase_times(Trace(names, array), panel_of("producer"))
    by_event = {phase.event: (begins, ends) for phase, begins, ends in times}
    begins, ends = by_event["down_issued"]
    assert begins.tolist() == pytest.approx([0.2, 0.6]) and ends.tolist() == [0.8, 0.8]
    assert np.isnan(by_event["up_issued"][1][0])
    # Out of order on CTA 1: it takes no time, and nothing is drawn to the left.
    assert timeline_plot.rows_path(*by_event["up_issued"]) == []


def test_consumers_wait_for_the_lists_and_not_for_the_scales() -> None:
    """As measured at M = 8, where the scales come 2 µs after the lists."""
    names = ("start", "x_ready", "lists", "scales", "first_tile", "up_done_0", "up_done_1")
    array = ORIGIN + np.array([[0, 1900, 2000, 4100, 2300, 28400, 28000]])
    for title, waits, up_from in (("consumers 0", 1.9, 2.3), ("consumers 1", 1.9, 2.0)):
        times = timeline_plot.phase_times(Trace(names, array), panel_of(title))
        by_event = {phase.event: (begins[0], ends[0]) for phase, begins, ends in times}
        assert "scales" not in by_event
        assert by_event["lists"] == pytest.approx((waits, 2.0))
        up = by_event["up_done_0" if title.endswith("0") else "up_done_1"]
        assert up[0] == pytest.approx(up_from)


def test_events_that_did_not_happen_are_not_drawn() -> None:
    trace = make_trace()
    gone = EVENTS.index("up_done_0")
    array = trace.array.copy()
    array[:, gone] = 0
    with_it, without = (
        texts(timeline_plot.draw(trace)),
        texts(timeline_plot.draw(Trace(EVENTS, array))),
    )
    count = sum(text.startswith("up → ") for text in with_it)
    assert sum(text.startswith("up → ") for text in without) == count - 1
    array[0, gone] = trace.array[0, gone]
    assert "nan" not in timeline_plot.draw(Trace(EVENTS, array))


def test_the_legend_gives_the_median_over_the_ctas_that_have_the_event() -> None:
    array = ORIGIN + np.array([[0, 1000], [0, 2000], [0, 9000], [0, -ORIGIN]])
    found = texts(timeline_plot.draw(Trace(("start", "first_copy"), array)))
    assert "routes its first unit → 2.0" in found


@pytest.mark.parametrize("ctas", [1, 2, 132, 1000])
def test_any_number_of_ctas_fits(ctas) -> None:
    for axes in painted(make_trace(ctas)):
        assert axes.get_ylim() == (ctas - 0.5, -0.5)


def test_one_event_on_one_cta_is_drawn() -> None:
    trace = Trace(("start",), np.array([[ORIGIN]]), title="a < b & c")
    assert "a < b & c" in texts(timeline_plot.draw(trace))


def test_the_floor_line_lies_at_its_time_even_beyond_the_last_event() -> None:
    for floor in (0.5, 40.0):
        for axes in painted(make_trace(floor_us=floor)):
            (line,) = (n for n in axes.lines if n.get_color() == timeline_plot.FLOOR_COLOUR)
            assert set(line.get_xdata()) == {floor} and axes.get_xlim()[1] > floor
    without = painted(make_trace())
    assert not any(n.get_color() == timeline_plot.FLOOR_COLOUR for n in without[0].lines)


def test_median_launch_ignores_what_did_not_happen() -> None:
    stamps = np.zeros((3, 2, 2), np.int64)
    for launch, length in enumerate((900, 100, 500)):
        stamps[launch, :, 0] = ORIGIN + 10_000 * launch
        stamps[launch, 1, 1] = ORIGIN + 10_000 * launch + length
    assert timeline.median_launch(stamps) == 2


class Recorder:
    """Stands for the parts of `collect` that need a GPU: three launches of different length."""

    def __init__(self, monkeypatch, wrong: bool = False, floor_check: str = "ok") -> None:
        xs = [torch.full((2, 4), float(i)) for i in range(3)]
        self.case = SimpleNamespace(
            xs=xs, logits=xs, want=[x + 1 for x in xs], lists=[[1], [2, 3], [4, 5, 6]], copies=2
        )
        self.wrong, self.floor_check, self.floor_lists = wrong, floor_check, None
        for name in ("make_case", "record", "floor_contestant", "take_turns"):
            monkeypatch.setattr(timeline, name, getattr(self, name))

    def make_case(self, pool, tokens, routing):
        return self.case

    def record(self, calls, spec):
        self.calls, self.spec = calls, spec
        for x, *_, out in calls:
            out.copy_(x + (2 if self.wrong else 1))
        stamps = ORIGIN + torch.tensor([[[0, 700]], [[0, 500]], [[0, 100]]])
        return ("start", "end"), stamps

    def floor_contestant(self, pool, lists, copies):
        self.floor_lists = lists
        return "contestant"

    def take_turns(self, contestants, replays):
        return {"floor": SimpleNamespace(times=[3.0, 4.0, 5.0], check=self.floor_check)}


OWN_SPEC = SimpleNamespace(grid=132)
POOL = SimpleNamespace(copies=[("a", "b", "c", "d"), ("e", "f", "g", "h")], spec=OWN_SPEC)


def test_collect_takes_the_median_launch_and_its_floor(monkeypatch) -> None:
    fake = Recorder(monkeypatch)
    trace = timeline.collect(POOL, 2)
    assert trace.array.tolist() == [[ORIGIN, ORIGIN + 500]]
    assert trace.floor_us == 4.0 and fake.floor_lists == [[2, 3]] * 3
    assert trace.title == "M = 2, 2 experts, cold L2"
    assert fake.spec.grid == 132 and [call[2] for call in fake.calls] == ["a", "e", "a"]


@pytest.mark.parametrize(
    "changes, message",
    [({"wrong": True}, "traced kernel is wrong"), ({"floor_check": "bad"}, "probe is wrong: bad")],
)
def test_collect_refuses_wrong_results(monkeypatch, changes, message) -> None:
    Recorder(monkeypatch, **changes)
    with pytest.raises(RuntimeError, match=message):
        timeline.collect(POOL, 2)


def test_command_line_draws_files(tmp_path, capsys) -> None:
    source = tmp_path / "run.json"
    source.write_text(stamps.to_json(make_trace(5, floor_us=9.0)), encoding="utf-8")
    assert timeline.main([str(source), "--out", str(tmp_path / "new")]) == 0
    drawn = (tmp_path / "new" / "run.svg").read_text(encoding="utf-8")
    assert drawn == timeline_plot.draw(stamps.read(source))
    printed = capsys.readouterr().out
    assert "floor 9.00 µs" in printed and "| start | 5 | 0.00 |" in printed


def test_command_line_says_why_it_cannot_record(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timeline.main(["--out", str(tmp_path)]) == 2
    assert "cannot record here: needs an sm_90" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_recording_is_kept_where_matplotlib_is_missing(tmp_path, capsys, monkeypatch) -> None:
    facts = SimpleNamespace(name="G", sm_count=4, l2_bytes=1, driver="5", index=0)
    monkeypatch.setattr(timeline.tool, "why_not_here", lambda: None)
    monkeypatch.setattr(timeline.tool, "facts", lambda: facts)
    monkeypatch.setattr(timeline, "make_pool", lambda copies: POOL)
    monkeypatch.setattr(timeline, "collect", lambda pool, m: make_trace(2, title=f"M = {m}"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["--tokens", "3", "--out", str(tmp_path / "new"), "--commit", "abc"]
    assert timeline.main(arguments) == 0
    (path,) = (tmp_path / "new").iterdir()
    got = stamps.read(path)
    assert path.name == "timeline_m3.json" and got.title == "M = 3"
    assert got.meta["commit"] == "abc" and got.meta["gpu"] == "G"
    assert "timeline_m3.svg is not drawn" in capsys.readouterr().out
