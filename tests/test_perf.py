"""The benchmarks' arithmetic, results files and report; the kernels only as machine code."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from cute_moe import reference
from cute_moe.host.compile import compile_report

ROOT = Path(__file__).resolve().parent.parent


def load(name: str):
    """perf/<name>.py, which is no package's module, under the name that its neighbours import."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "perf" / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


floor, protocol, report, bench = map(load, ("floor", "protocol", "report", "bench"))
MB = 1 << 20


def make_row(contestant: str, us: float, tokens: int | None = 2, **changes):
    fields = dict(op="moe", contestant=contestant, tokens=tokens, case=None, routing="uniform",
                  cache="cold", us=us, spread_us=(us - 0.1, us + 0.2), bytes=16 * 3 * MB,
                  experts=16.0, reuse_bytes=300 * MB, check="ok")  # fmt: skip
    return protocol.Row(**{**fields, **changes})


def example_rows():
    case = dict(case="empty kernel", routing="none", check="none")
    return [
        make_row("cute_moe", 15.0),
        make_row("floor", 12.0),
        make_row("cute_moe", 11.0, cache="warm"),
        make_row("cute_moe", 25.0, cache="eager"),
        make_row("empty", 2.0, None, **case),
    ]


def test_bytes_of_an_expert() -> None:
    assert (protocol.UP_BYTES, protocol.DOWN_BYTES) == (2 * MB, 1 * MB)
    spec = floor.FloorSpec()
    assert spec.up_chunks * floor.CHUNK_BYTES == protocol.UP_BYTES
    assert spec.down_chunks * floor.CHUNK_BYTES == protocol.DOWN_BYTES


def test_active_experts_are_distinct_and_in_order_of_appearance() -> None:
    logits = torch.zeros(2, 256)
    logits[0, [9, 3, 7, 1, 200, 100, 50, 25]] = torch.arange(8.0, 0.0, -1.0)
    logits[1] = logits[0]
    logits[1, 4] = 20.0
    assert protocol.active_experts(logits) == [9, 3, 7, 1, 200, 100, 50, 25, 4]
    assert protocol.mean_experts([[1, 2], [3]]) == 1.5


@pytest.mark.parametrize("routing", protocol.ROUTINGS)
def test_routings(routing) -> None:
    drawn = protocol.draw_logits(4, routing, 24, torch.Generator().manual_seed(1))
    lists = [protocol.active_experts(logits) for logits in drawn]
    assert all(logits.dtype == torch.bfloat16 for logits in drawn)
    assert len({tuple(ids) for ids in lists}) == 24, "every launch has a routing of its own"
    if routing == "same":
        assert {len(ids) for ids in lists} == {8}
        assert len({e for ids in lists for e in ids}) == 24 * 8
    else:
        assert 8 < protocol.mean_experts(lists) < 32
    assert protocol.reuse_bytes(lists, bench.COPIES) > 11 * 8 * protocol.EXPERT_BYTES


def test_skewed_routing_has_fewer_experts() -> None:
    def mean(routing: str) -> float:
        drawn = protocol.draw_logits(8, routing, 24, torch.Generator().manual_seed(1))
        return protocol.mean_experts([protocol.active_experts(logits) for logits in drawn])

    assert mean("skewed") < 0.8 * mean("uniform")


def test_unknown_routing() -> None:
    with pytest.raises(ValueError, match="routing"):
        protocol.draw_logits(1, "other", 1, torch.Generator())


def test_reuse_distance() -> None:
    # One expert all the time: between two uses of its w_up lies its w_down, and vice versa.
    assert protocol.reuse_bytes([[5]], 1) == 1 * MB
    # After w_up of 5 in the last launch: w_up of 6 and both w_down, then w_up of 5 once more.
    assert protocol.reuse_bytes([[5, 6], [7], [5, 6]], 1) == 4 * MB
    # Another copy for every launch: a whole launch of the other copy lies between.
    assert protocol.reuse_bytes([[5], [5]], 2) == 1 * MB + 3 * MB
    assert protocol.reuse_bytes([[5], [5]], 1) == 1 * MB


def test_copies_keep_every_case_cold() -> None:
    least = 8 * protocol.EXPERT_BYTES * (bench.COPIES - 1)
    assert protocol.LAUNCHES % bench.COPIES == 0
    assert least > protocol.COLD_FACTOR * 60 * MB, "the L2 of an H200"


def test_summary() -> None:
    assert protocol.summary([float(i) for i in range(11)]) == (5.0, (1.0, 9.0))


def test_relative_error_of_a_poisoned_output_fails() -> None:
    want = torch.ones(2, 4)
    assert reference.relative_error(want, want) == 0.0
    assert not reference.relative_error(torch.full((2, 4), torch.nan), want) <= bench.MAX_ERROR


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


def test_table() -> None:
    lines = report.moe_table(example_rows()).splitlines()
    assert lines[2:] == [
        "| uniform | 2 | 16.0 | 50.3 | 12.0 | 15.0 | 1.25 | 11.0 | 25.0 |",
    ]
    assert {line.count("|") for line in lines} == {10}
    peers = report.moe_table([*example_rows(), make_row("torch", 99.0)])
    assert "| torch µs |" in peers and "| 1.25 | 99.0 | 11.0 |" in peers


def test_block_is_replaced() -> None:
    readme = "a\n<!-- perf:moe -->\nold\n<!-- /perf:moe -->\nb\n"
    want = "a\n<!-- perf:moe -->\nnew \\1\n<!-- /perf:moe -->\nb\n"
    assert report.replaced(readme, "new \\1\n") == want
    with pytest.raises(ValueError, match="perf:moe"):
        report.replaced("nothing", "new\n")


def test_command_line() -> None:
    args = bench.parse_args(["moe", "--tokens", "1,8", "--json"])
    assert args.tokens == (1, 8) and args.json == report.RESULTS / "moe.json"
    assert bench.parse_args(["all"]).json is None
    for bad in (["moe", "--tokens", "0"], ["moe", "--tokens", "a"], []):
        with pytest.raises(SystemExit):
            bench.parse_args(bad)


def test_bench_says_why_it_cannot_run(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["moe"]) == 2
    assert "cannot measure here" in capsys.readouterr().out


def test_committed_results_are_what_the_readme_says() -> None:
    path = report.RESULTS / "moe.json"
    if not path.exists():
        pytest.skip("no results yet")
    meta = json.loads(path.read_text(encoding="utf-8"))["meta"]
    assert {"gpu", "driver", "clocks", "versions", "commit", "date", "protocol"} <= set(meta)
    rows = report.read_rows()
    assert all(row.passed for row in rows)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert report.replaced(readme, report.moe_table(rows)) == readme
