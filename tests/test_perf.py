"""The benchmarks' arithmetic and rules; their kernels only as machine code."""

import functools
import importlib
import itertools
import json
from dataclasses import replace

import bench
import bench_moe
import contest
import floor
import protocol
import pytest
import report
import tool
import torch
from perf_rows import MB, FakeGraph, Streams, example_rows, fake_interleave, make_row

from cute_moe import reference
from cute_moe.host.compile import compile_report
from cute_moe.host.device import DeviceFacts
from cute_moe.shapes import SHAPES, LayerShape


def test_the_probe_reads_the_bytes_of_an_expert() -> None:
    assert floor.FloorSpec.of(protocol.SHAPE, 132) == floor.FloorSpec()
    for shape in SHAPES.values():
        spec = floor.FloorSpec.of(shape, 132)
        read = (spec.up_chunks + spec.down_chunks) * floor.CHUNK_BYTES
        assert read == 3 * shape.hidden * shape.intermediate and spec.up_chunks > spec.down_chunks


def test_the_probe_refuses_what_is_no_whole_chunk() -> None:
    with pytest.raises(ValueError, match="shape: expected down_bytes .* got 24576 "):
        floor.FloorSpec.of(LayerShape(8, 768, 32, 2), 132)


def test_active_experts_are_distinct_and_in_order_of_appearance() -> None:
    logits = torch.zeros(2, 256)
    logits[0, [9, 3, 7, 1, 200, 100, 50, 25]] = torch.arange(8.0, 0.0, -1.0)
    logits[1] = logits[0]
    logits[1, 4] = 20.0
    assert protocol.active_experts(logits, 8) == [9, 3, 7, 1, 200, 100, 50, 25, 4]
    assert protocol.mean_experts([[1, 2], [3]]) == 1.5


@pytest.mark.parametrize("routing", protocol.ROUTINGS)
def test_routings(routing) -> None:
    shape = protocol.SHAPE
    drawn = protocol.draw_logits(4, routing, 24, torch.Generator().manual_seed(1), shape)
    lists = [protocol.active_experts(logits, shape.top_k) for logits in drawn]
    assert all(logits.dtype == torch.bfloat16 for logits in drawn)
    assert len({tuple(ids) for ids in lists}) == 24, "every launch has a routing of its own"
    if routing == "same":
        assert {len(ids) for ids in lists} == {8}
        assert len({e for ids in lists for e in ids}) == 24 * 8
    else:
        assert 8 < protocol.mean_experts(lists) < 32
    assert protocol.reuse_bytes(lists, protocol.COPIES, shape) > 11 * 8 * shape.expert_bytes


def test_skewed_routing_has_fewer_experts() -> None:
    def mean(routing: str) -> float:
        shape = protocol.SHAPE
        drawn = protocol.draw_logits(8, routing, 24, torch.Generator().manual_seed(1), shape)
        return protocol.mean_experts(
            [protocol.active_experts(logits, shape.top_k) for logits in drawn]
        )

    assert mean("skewed") < 0.8 * mean("uniform")


def test_unknown_routing() -> None:
    with pytest.raises(ValueError, match="routing"):
        protocol.draw_logits(1, "other", 1, torch.Generator(), protocol.SHAPE)


def test_reuse_distance() -> None:
    shape = protocol.SHAPE
    # One expert all the time: between two uses of its w_up lies its w_down, and vice versa.
    assert protocol.reuse_bytes([[5]], 1, shape) == 1 * MB
    # After w_up of 5 in the last launch: w_up of 6 and both w_down, then w_up of 5 once more.
    assert protocol.reuse_bytes([[5, 6], [7], [5, 6]], 1, shape) == 4 * MB
    # Another copy for every launch: a whole launch of the other copy lies between.
    assert protocol.reuse_bytes([[5], [5]], 2, shape) == 1 * MB + 3 * MB
    assert protocol.reuse_bytes([[5], [5]], 1, shape) == 1 * MB


def test_copies_keep_every_case_cold() -> None:
    least = min(shape.top_k * shape.expert_bytes for shape in SHAPES.values())
    least *= protocol.COPIES - 1
    assert protocol.LAUNCHES % protocol.COPIES == 0
    assert least > protocol.COLD_FACTOR * 60 * MB, "the L2 of an H200"


def test_summary() -> None:
    assert protocol.summary([float(i) for i in range(11)]) == (5.0, (1.0, 9.0))


def test_relative_error_of_a_poisoned_output_fails() -> None:
    want = torch.ones(2, 4)
    assert reference.relative_error(want, want) == 0.0
    assert not reference.relative_error(torch.full((2, 4), torch.nan), want) <= protocol.MAX_ERROR


def test_sums_of_the_probe() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randint(0, 256, (3, chunks, floor.CHUNK_BYTES), dtype=torch.uint8,
                             generator=generator) for chunks in (2, 1)]  # fmt: skip
    seen = [floor.samples(w, w.shape[1]) for w in weights]
    got = floor.expected_sums(*seen, [2, 0], grid=4).view(4, floor.LANES)
    order = [weights[0][2, 0], weights[0][2, 1], weights[0][0, 0], weights[0][0, 1],
             weights[1][2, 0], weights[1][0, 0]]  # fmt: skip
    for cta in range(4):
        for lane in (0, 31):
            word = lane * floor.SAMPLE_STRIDE
            values = [int(c.view(torch.int32)[word]) for c in order[cta::4]]
            assert (sum(values) - int(got[cta, lane])) % 2**32 == 0


def test_machine_code() -> None:
    spec = floor.FloorSpec()
    probe = compile_report(spec, lambda options: floor.build_floor(spec, options))
    assert probe.counts["UBLKCP.S.G"] == 1
    assert probe.smem_bytes == spec.stages * (floor.CHUNK_BYTES + 16)
    assert not probe.uses_local_memory
    empty = floor.EmptySpec()
    nothing = compile_report(empty, lambda options: floor.build_empty(empty, options))
    assert not nothing.counts["LDG"] and not nothing.counts["STG"]


def test_json_round_trip() -> None:
    rows = example_rows()
    content = json.loads(protocol.to_text(protocol.to_json({"gpu": "x"}, rows)))
    assert protocol.from_json(content) == rows
    assert "case" not in content["rows"][0] and "tokens" not in content["rows"][-1]
    with pytest.raises(TypeError):
        protocol.from_json({"rows": [{**content["rows"][0], "other": 1}]})


def test_command_line() -> None:
    assert bench.parse_args(["moe", "--tokens", "1,8"]).tokens == (1, 8)
    args = bench.parse_args(["moe", "--json"])
    assert args.json == report.RESULTS
    assert args.peers is None and bench.parse_args(["moe", "--peers", "none"]).peers == ()
    assert bench.parse_args(["all", "--peers", "torch,copy"]).peers == ("torch", "copy")
    assert bench.parse_args(["all"]).modes == tuple(bench.MODES)
    for bad in (["moe", "--tokens", "0"], ["moe", "--tokens", "a"], [], ["other"],
                ["moe", "--peers", "x"], ["all", "--json", "all.json"], ["moe", "--replays", "0"],
                ["moe", "--copies", "0"], ["moe", "--quick", "--json"]):  # fmt: skip
        with pytest.raises(SystemExit):
            bench.parse_args(bad)


def test_few_cases_do_not_replace_the_committed_results(tmp_path, capsys) -> None:
    for few in (["--quick"], ["--tokens", "1"]):
        with pytest.raises(SystemExit):
            bench.parse_args(["moe", *few, "--json"])
        assert "must not overwrite" in capsys.readouterr().err
        assert bench.parse_args(["moe", *few, "--json", str(tmp_path)]).json == tmp_path


@pytest.mark.parametrize("mode", bench.MODES)
def test_every_mode_has_a_module(mode) -> None:
    module = importlib.import_module(f"bench_{mode}")
    assert callable(module.measure) and module.__doc__


def measured(monkeypatch, tmp_path, row: protocol.Row, *arguments: str) -> tuple[int, dict]:
    """bench.py on a pretended GPU that measures `row`: the exit code and the results file."""
    facts = DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 232448, 60 * MB, "580")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(contest, "SKIPPED", {"other": "a reason of another mode"})
    monkeypatch.setattr(tool, "facts", lambda: facts)
    monkeypatch.setattr(protocol, "limits_of", lambda facts: H200)
    seen = []

    def measure(options: contest.Options, advance: contest.Advance) -> list[protocol.Row]:
        seen.append(options)
        advance("a step", 1)
        contest.skip("flashinfer", OSError("no file"))
        return [row, make_row("floor", 12.0)]

    monkeypatch.setattr(bench_moe, "measure", measure)
    path = tmp_path / "out.json"
    code = bench.main(["moe", "--json", str(path), "--plot", str(tmp_path), *arguments])
    assert seen == [bench.Options(replays=7, peers=("torch",))]
    return code, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("us, code", [(15.0, 0), (0.08, 1)])
def test_results_file_and_exit_code(monkeypatch, tmp_path, capsys, us, code) -> None:
    row = make_row("cute_moe", us, of_floor=1.25)
    options = ["--replays", "7", "--peers", "torch", "--commit", "abc"]
    got, content = measured(monkeypatch, tmp_path, row, *options)
    assert got == code
    first, _ = protocol.from_json(content)
    assert first.passed is (code == 0) and first.us == us
    meta = content["meta"]
    assert meta["gpu"] == "NVIDIA H200" and meta["commit"] == "abc"
    settings = meta["protocol"]
    assert settings["replays"] == 7 and "24 launches" in settings["text"]
    assert settings["peers"] == ["torch"] and settings["tokens"] is None
    assert settings["skipped"] == {"flashinfer": "OSError: no file"}
    assert (tmp_path / "moe_qwen3.5-35b.svg").exists()
    out = capsys.readouterr().out
    assert "1.250" in out and ("1 FAILED" in out) is (code == 1)


@pytest.mark.parametrize("part", ["measure", "draw"])
def test_one_mode_that_fails_does_not_lose_the_others(monkeypatch, tmp_path, capsys, part) -> None:
    monkeypatch.setattr(tool, "why_not_here", lambda: None)
    done = []

    def measure(mode: str, *_: object) -> list[protocol.Row]:
        done.append(mode)
        if mode == "moe" and part == "measure":
            raise RuntimeError("out of luck")
        return [make_row("empty", 2.0, bytes=0, reuse_bytes=0)]

    def draw(mode: str, rows: list[protocol.Row]) -> str:
        if mode == "moe" and part == "draw":
            raise RuntimeError("out of luck")
        return ""

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench.plot, "draw", draw)
    assert bench.main(["all", "--plot", str(tmp_path)]) == 1
    assert done == list(bench.MODES)
    assert "out of luck" in capsys.readouterr().out


def test_bench_says_why_it_cannot_run(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["moe"]) == 2
    assert "cannot measure here" in capsys.readouterr().out


@pytest.mark.parametrize("empty", [False, True])
def test_an_empty_replay_leaves_the_poison(monkeypatch, empty) -> None:
    out = torch.zeros(3)
    contestant = contest.Contestant(
        [lambda: out.fill_(1.0)],
        lambda: out.fill_(torch.nan),
        lambda: protocol.OK if bool((out == 1.0).all()) else "wrong",
    )
    Streams(monkeypatch)
    monkeypatch.setattr(contest, "capture", lambda launches: FakeGraph(launches, empty))
    monkeypatch.setattr(protocol, "interleave", fake_interleave)
    assert contest.take_turns({"a": contestant}, 3)["a"].check == ("wrong" if empty else "ok")


def test_a_peer_that_cannot_be_captured_is_skipped(monkeypatch, capsys) -> None:
    def capture(launches):
        streams.seen = [streams.current]
        streams.current = "capture"
        graph = FakeGraph(launches, empty=False)
        streams.current = streams.seen[0]
        return graph

    def broken() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(contest, "capture", capture)
    monkeypatch.setattr(protocol, "interleave", fake_interleave)
    good = contest.Contestant([lambda: None], lambda: None, lambda: protocol.OK)
    bad = contest.Contestant([broken], lambda: None, lambda: protocol.OK)
    monkeypatch.setattr(contest, "SKIPPED", {})
    streams = Streams(monkeypatch)
    for _ in range(2):
        streams.current = "before"
        assert set(contest.take_turns({"torch_compile": bad, "cute_moe": good}, 2)) == {"cute_moe"}
        assert streams.seen == ["before"] and streams.current == "before"
    assert capsys.readouterr().out == "torch_compile: skipped, RuntimeError: no compiler\n"
    assert contest.SKIPPED == {"torch_compile": "RuntimeError: no compiler"}
    for ours in ("cute_moe", "cute_moe_bf16", "cute_moe_programmatic", "floor", "copy"):
        with pytest.raises(RuntimeError, match="no compiler"):
            contest.take_turns({ours: bad}, 2)


def test_contestants_take_turns_on_a_clean_cache(monkeypatch) -> None:
    log, clock = [], itertools.count()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)
            log.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1e-3 * (1 + end.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(protocol, "l2_cleaner", lambda: lambda: log.append("clean"))
    works = {name: functools.partial(log.append, name) for name in "ab"}
    times = protocol.interleave(works, 2)
    a, b = (["clean", "event", name, "event"] for name in "ab")
    turns = [a + b, b + a] * protocol.REPLAYS
    assert log == sum(turns[: protocol.WARM_UP_REPLAYS + 2], []) + ["wait"]
    # Numbers of the end events: the first timed turn is odd, so b comes first in it.
    first = 4 * protocol.WARM_UP_REPLAYS + 2
    assert times == {
        "a": pytest.approx([first + 2, first + 4]),
        "b": pytest.approx([first, first + 6]),
    }


def test_every_contestant_starts_turns() -> None:
    orders = list(protocol.turns("abc", 4))
    assert len(orders) == protocol.WARM_UP_REPLAYS + 4
    assert orders[:4] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_eager_calls_take_turns(monkeypatch) -> None:
    log, clock = [], itertools.count()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: next(clock) * 6e-6)
    good = {
        name: contest.Contestant([functools.partial(log.append, name)] * count,
                              functools.partial(log.append, "poison"), lambda: protocol.OK)
        for name, count in (("a", 2), ("b", 3))
    }  # fmt: skip
    results = contest.eager(good, 1)
    assert log[:2] == ["poison"] * 2
    assert "".join(log[2:]) == "aabbbbbbaa" * 3
    assert results["a"] == contest.Result([pytest.approx(3.0)], "ok")
    assert results["b"] == contest.Result([pytest.approx(2.0)], "ok")


def test_rows_of_a_run_have_the_ratio_of_each_turn() -> None:
    results = {
        "floor": contest.Result([10.0, 20.0, 30.0], "ok"),
        "cute_moe": contest.Result([11.0, 24.0, 36.0], "ok"),
    }
    fields = dict(op="moe", tokens=1, case=None, routing="uniform", cache="cold", bytes=1,
                  experts=8.0, reuse_bytes=0)  # fmt: skip
    floor_row, ours = contest.rows(results, **fields)
    assert floor_row.of_floor is None and ours.of_floor == 1.2
    assert (ours.us, ours.contestant, ours.check) == (24.0, "cute_moe", "ok")


H200 = protocol.Limits(dram=4.9e6, l2=16.7e6)


def test_impossible_rates_fail() -> None:
    published = make_row("cute_moe", 0.08, None, case="2048 x 128 fp32", bytes=2 * MB)
    assert published.passed
    for cache in ("cold", "warm", "eager"):
        row = protocol.guarded(replace(published, cache=cache), H200)
        assert row.check.startswith("impossible: 26.2 TB/s") and not row.passed
    assert not protocol.guarded(make_row("x", 0.0, bytes=1), H200).passed


def test_possible_rates_keep_their_check() -> None:
    for row in (make_row("floor", 12.0), make_row("empty", 1.0, bytes=0, check="none")):
        assert protocol.guarded(row, H200) is row
    beyond_dram = make_row("cute_moe", 5.0)
    assert not protocol.guarded(beyond_dram, H200).passed
    assert protocol.guarded(replace(beyond_dram, cache="warm"), H200).passed


@pytest.mark.parametrize(
    "changes",
    [dict(cache="hot"), dict(routing="random"), dict(case="x"), dict(tokens=None)],
)
def test_rows_that_make_no_sense(changes) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        make_row("cute_moe", 1.0, **changes)


def test_a_cold_row_must_be_cold(monkeypatch) -> None:
    facts = type("Facts", (), {"l2_bytes": 60 * MB})
    monkeypatch.setattr(tool, "facts", lambda: facts)
    lists = [list(range(8))] * protocol.LAUNCHES
    for copies, check in ((1, "not cold: 23 MB between two uses"), (protocol.COPIES, "ok")):
        case = bench_moe.Case(1, "uniform", [], [], lists, [], [], copies, protocol.SHAPE)
        (row,) = bench_moe.case_rows(case, {"cute_moe": contest.Result([2.0], "ok")}, "cold")
        assert row.check == check and row.experts == 8.0 and row.bytes == 24 * MB
