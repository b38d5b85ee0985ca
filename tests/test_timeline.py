"""Traces and their drawings; recording needs a GPU, so here only its wiring."""

import json
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import numpy as np
import pytest
import timeline
import timeline_svg as svg
import torch

from cute_moe.kernels.moe.spec import EVENTS

ORIGIN = 1_796_000_000_000_000_000  # a time as the global timer gives it: ns since 1970
TAG = "{http://www.w3.org/2000/svg}"


def make_trace(ctas: int = 132, names=EVENTS, **changes) -> svg.Trace:
    """Event i of CTA c at (1000 i + 32 (c % 7)) ns."""
    event, cta = np.arange(len(names)), np.arange(ctas)
    array = ORIGIN + 1000 * event[None, :] + 32 * (cta[:, None] % 7)
    return svg.Trace(**{"names": tuple(names), "array": array, **changes})


def texts(drawing: str) -> list[str]:
    return ["".join(node.itertext()) for node in xml.fromstring(drawing).iter(f"{TAG}text")]


def paths(drawing: str, colour: str) -> list[str]:
    nodes = xml.fromstring(drawing).iter(f"{TAG}path")
    return [node.get("d") for node in nodes if node.get("stroke") == colour]


def phase(panel: str, event: str) -> svg.Phase:
    (found,) = (p for p in svg.PANELS if p.title.startswith(panel))
    return next(p for p in found.phases if p.event == event)


def test_times_count_from_the_earliest_event_and_zero_is_absent() -> None:
    array = np.array([[ORIGIN + 500, 0], [ORIGIN, ORIGIN + 2500]])
    trace = svg.Trace(("start", "end"), array)
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


def test_json_and_npz_give_the_same_trace(tmp_path) -> None:
    trace = make_trace(3, floor_us=41.5, title="M = 8")
    (tmp_path / "a.json").write_text(timeline.to_json(trace), encoding="utf-8")
    np.savez(tmp_path / "b.npz", names=trace.names, array=trace.array, floor_us=41.5, title="M = 8")
    for name in ("a.json", "b.npz"):
        got = timeline.read(tmp_path / name)
        assert (got.names, got.floor_us, got.title) == (trace.names, 41.5, "M = 8")
        assert (got.array == trace.array).all()


def test_a_file_with_names_and_array_only_is_enough(tmp_path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"names": ["start"], "array": [[7]]}), encoding="utf-8")
    got = timeline.read(path)
    assert got.floor_us is None and got.title == "run"
    path.write_text(json.dumps({"names": ["start"]}), encoding="utf-8")
    with pytest.raises(KeyError, match="array"):
        timeline.read(path)
    with pytest.raises(ValueError, match=r"expected a \.npz or \.json file"):
        timeline.read(tmp_path / "run.csv")


def test_table_counts_the_ctas_of_each_event() -> None:
    array = ORIGIN + np.array([[0, 2000], [100, 4000], [300, -ORIGIN]])
    assert timeline.table(svg.Trace(("start", "end"), array)) == (
        "| event | CTAs | min µs | median µs | max µs |\n"
        "|---|---:|---:|---:|---:|\n"
        "| start | 3 | 0.00 | 0.10 | 0.30 |\n"
        "| end | 2 | 2.00 | 3.00 | 4.00 |\n"
    )


def test_table_of_an_event_that_never_happened() -> None:
    trace = svg.Trace(("start", "end"), np.array([[ORIGIN, 0]]))
    assert "| end | 0 |  |  |  |\n" in timeline.table(trace)


def test_panels_know_the_events_of_the_kernel_and_no_others() -> None:
    assert {p.event for panel in svg.PANELS for p in panel.phases} == set(EVENTS)


def test_drawing_is_deterministic_and_1000_pixels_wide() -> None:
    trace = make_trace(floor_us=12.0)
    drawing = svg.draw(trace)
    root = xml.fromstring(drawing)
    assert drawing == svg.draw(make_trace(floor_us=12.0))
    assert root.get("width") == "1000" and 0 < int(root.get("height")) < 2000
    assert "nan" not in drawing and "inf" not in drawing
    assert {panel.title for panel in svg.PANELS} <= set(texts(drawing))


def test_a_phase_has_a_line_for_every_cta_and_the_length_of_its_time() -> None:
    array = ORIGIN + np.array([[0, 1000, 4000], [0, 2000, 4000]])
    drawing = svg.draw(svg.Trace(("start", "first_copy", "up_issued"), array))
    scale = (svg.WIDTH - svg.LEFT - svg.RIGHT) / 4.0
    for event, microseconds in (("first_copy", [1, 2]), ("up_issued", [3, 2])):
        (path,) = paths(drawing, phase("producer", event).colour)
        moves = [line.split("h") for line in path[1:].split("M")]
        assert [float(length) for _, length in moves] == pytest.approx(
            [us * scale for us in microseconds], abs=0.06
        )
        rows = [float(start.split()[1]) for start, _ in moves]
        assert rows[1] - rows[0] == svg.MAX_ROW


def test_a_phase_begins_at_the_latest_event_before_it_that_happened() -> None:
    names = ("start", "first_copy", "up_issued", "down_issued")
    array = np.array([[100, 300, 0, 900], [100, 700, 600, 900]])
    trace = svg.Trace(names, array)
    times = {p.event: (a, b) for p, a, b in svg.phase_times(trace, svg.PANELS[0])}
    begins, ends = times["down_issued"]
    assert begins.tolist() == pytest.approx([0.2, 0.6]) and ends.tolist() == [0.8, 0.8]
    assert np.isnan(times["up_issued"][1][0])
    # Out of order on CTA 1: it takes no time, and nothing is drawn to the left.
    assert svg.rows_path(*times["up_issued"], svg.Scale(10.0), 0.0, 2.0) == ""


def test_events_that_did_not_happen_leave_no_trace() -> None:
    trace = make_trace()
    gone = EVENTS.index("first_tile")
    array = trace.array.copy()
    array[:, gone] = 0
    with_it, without = svg.draw(trace), svg.draw(svg.Trace(EVENTS, array))
    assert any(text.startswith("first_tile ") for text in texts(with_it))
    assert not any(text.startswith("first_tile ") for text in texts(without))
    array[0, gone] = trace.array[0, gone]
    assert "nan" not in svg.draw(svg.Trace(EVENTS, array))


def test_the_mark_of_an_event_is_its_median_over_the_ctas_that_have_it() -> None:
    array = ORIGIN + np.array([[0, 1000], [0, 2000], [0, 9000], [0, -ORIGIN]])
    assert "first_copy 2.0" in texts(svg.draw(svg.Trace(("start", "first_copy"), array)))


@pytest.mark.parametrize("ctas", [1, 2, 132, 1000])
def test_any_number_of_ctas_fits(ctas) -> None:
    root = xml.fromstring(svg.draw(make_trace(ctas)))
    assert int(root.get("height")) < 4000


def test_one_event_on_one_cta_is_drawn() -> None:
    drawing = svg.draw(svg.Trace(("start",), np.array([[ORIGIN]])))
    assert "start 0.0" in texts(drawing)


def test_unknown_events_are_marked_in_a_panel_of_their_own() -> None:
    drawing = svg.draw(make_trace(4, names=("start", "later & <odd>"), title="a < b & c"))
    assert {"later & <odd> 1.0", "other events", "a < b & c"} <= set(texts(drawing))
    assert "other events" not in texts(svg.draw(make_trace(4)))


def test_the_floor_line_lies_at_its_time_even_beyond_the_last_event() -> None:
    for floor in (0.5, 40.0):
        drawing = svg.draw(make_trace(floor_us=floor))
        (path,) = paths(drawing, svg.FLOOR_COLOUR)
        end = max(make_trace().last, floor)
        x = svg.LEFT + floor * (svg.WIDTH - svg.LEFT - svg.RIGHT) / end
        assert float(path[1:].split()[0]) == pytest.approx(x, abs=0.06)
        assert f"floor {floor:.1f} µs" in texts(drawing)
    assert not paths(svg.draw(make_trace()), svg.FLOOR_COLOUR)


def test_labels_on_one_line_do_not_overlap() -> None:
    labels = [(10.0, "up_done_0 26.9"), (20.0, "b 1.0"), (60.0, "c 2.0"), (300.0, "d 3.0")]
    levels = svg.label_levels(labels)
    assert levels == [0, 1, 1, 0]
    assert svg.label_levels([]) == []


@pytest.mark.parametrize("nanoseconds, step", [(3000, 0.5), (45_000, 5), (5_000_000, None)])
def test_axis_has_few_round_ticks(nanoseconds, step) -> None:
    trace = svg.Trace(("start", "end"), np.array([[ORIGIN, ORIGIN + nanoseconds]]))
    axis = svg.draw_axis(svg.Scale(800 / trace.last), trace.last, 0.0)
    ticks = [float(node.split(">")[1].split("<")[0]) for node in axis if "middle" in node]
    assert 3 <= len(ticks) <= svg.TICK_STEPS + 1 and ticks[0] == 0
    if step:
        assert ticks[1] == step


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


POOL = SimpleNamespace(copies=[("a", "b", "c", "d"), ("e", "f", "g", "h")], grid=132)


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
    source.write_text(timeline.to_json(make_trace(5, floor_us=9.0)), encoding="utf-8")
    assert timeline.main([str(source), "--out", str(tmp_path / "new")]) == 0
    drawn = (tmp_path / "new" / "run.svg").read_text(encoding="utf-8")
    assert drawn == svg.draw(timeline.read(source))
    printed = capsys.readouterr().out
    assert "floor 9.00 µs" in printed and "| start | 5 | 0.00 |" in printed


def test_command_line_says_why_it_cannot_record(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timeline.main(["--out", str(tmp_path)]) == 2
    assert "cannot record here: needs an sm_90" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
