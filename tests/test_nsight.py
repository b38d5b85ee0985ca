"""Nsight: the table from ncu's CSV, the driver's command line, the scripts with fake profilers."""

import csv
import io
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from nsight import driver, table

FOLDER = Path(__file__).resolve().parent.parent / "perf" / "nsight"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
# Columns of a raw page: name, unit, and the cell of a launch at M = 1 and at M = 8.
RAW = [
    ("ID", "", "0", "1"),
    ("Process ID", "", "672", "672"),
    (RANGES, "", "M=1 experts=8", "M=8 experts=57"),
    ("Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg", "", "", ""),
    ("Kernel Name", "", "mono_moe_0", "mono_moe_0"),
    ("Block Size", "", "(640, 1, 1)", "(640, 1, 1)"),
    ("CC", "", "9.0", "9.0"),
    ("launch__grid_size", "", "132", "132"),
    ("launch__block_size", "", "640", "640"),
    ("launch__registers_per_thread", "register/thread", "96", "96"),
    ("launch__shared_mem_per_block_dynamic", "byte/block", "195,104", "195,104"),
    ("sm__maximum_warps_per_active_cycle_pct", "%", "31.25", "31.25"),
    ("gpu__time_duration.sum", "ns", "12,608", "47,136"),
    ("dram__bytes_read.sum", "byte", "25,229,568", "179,443,968"),
    ("dram__bytes_read.sum.per_second", "byte/s", "2,001,000,000,000.14", "3,807,000,000,000.00"),
    ("sm__cycles_elapsed.avg.per_second", "hz", "1,800,893,612.52", "1,836,471,255.32"),
    ("smsp__inst_executed.sum", "inst", "1,872,707", "9,981,232"),
    ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum", "", "0", "131,169"),
    ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum", "", "0", "23,537"),
    (STALL.format("long_scoreboard"), "inst", "6.00", "8.00"),
    (STALL.format("selected"), "inst", "1.00", "1.00"),
    (STALL.format("wait"), "inst", "2.90", "0.90"),
    (STALL.format("gmma"), "inst", "0.10", "0.10"),
]


def cell(name: str, text: str) -> str:
    """A cell as ncu writes it: ranges come with thread, domain and the fields of the range."""
    full = f'672  "<default domain>:{text}:none:none:none:none:none:none" '
    return full if name == RANGES and text else text


def raw_page(columns=RAW, launches=(1, 0)) -> str:
    """ncu's raw page as CSV; `launches` picks and orders the lines."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([name for name, *_ in columns])
    writer.writerow([unit for _, unit, *_ in columns])
    for i in launches:
        writer.writerow([cell(name, cells[i]) for name, _, *cells in columns])
    return out.getvalue()


def changed(name: str, unit: str, *cells: str) -> list[tuple[str, ...]]:
    """RAW with another unit and other cells in one column."""
    return [(name, unit, *cells) if column[0] == name else column for column in RAW]


def test_launches_are_read_in_order_of_m() -> None:
    one, eight = table.parse(raw_page())
    assert (one.tokens, one.experts, eight.tokens, eight.experts) == (1, 8, 8, 57)
    assert one.metrics["dram__bytes_read.sum"] == 25_229_568
    assert eight.metrics["gpu__time_duration.sum"] == 47_136
    assert eight.weight_bytes == 57 * 3 * 2**20
    assert "Kernel Name" not in one.metrics


@pytest.mark.parametrize(
    "unit, factor",
    [("ns", 1), ("us", 1e3), ("ms", 1e6), ("s", 1e9), ("byte", 1), ("Kbyte", 1e3), ("Mbyte", 1e6),
     ("Tbyte/s", 1e12), ("Kbyte/block", 1e3), ("hz", 1), ("Ghz", 1e9), ("%", 1), ("", 1),
     ("inst", 1), ("sector", 1)],
)  # fmt: skip
def test_units(unit, factor) -> None:
    assert table.base_factor(unit) == factor


def test_both_kinds_of_units_give_one_table() -> None:
    scaled = changed("gpu__time_duration.sum", "us", "12.608", "47.136")
    assert table.table(table.parse(raw_page(scaled))) == table.table(table.parse(raw_page()))


def test_table_has_a_column_per_m_and_no_row_for_what_was_not_measured() -> None:
    text = table.table(table.parse(raw_page()))
    lines = text.splitlines()
    assert lines[:3] == ["| M | 1 | 8 |", "|---|---:|---:|", "| active experts | 8 | 57 |"]
    for line in (
        "| time, µs | 12.6 | 47.1 |",
        "| SM clock, GHz | 1.80 | 1.84 |",
        "| DRAM read, MB | 25.2 | 179.4 |",
        "| DRAM read / weights of these experts | 1.003 | 1.001 |",
        "| DRAM read, TB/s | 2.00 | 3.81 |",
        "| warp instructions, thousands | 1873 | 9981 |",
        "| bank conflicts, % of shared-memory stores | 0.0 | 17.9 |",
    ):
        assert line in lines
    assert "L2" not in text and "loads" not in text
    assert text.endswith(
        "132 CTAs of 640 threads; 96 registers a thread at launch, 195104 bytes of shared memory "
        "a CTA; at most 31.25 % of an SM's warps.\n"
    )


def test_stalls_are_shares_of_the_warps_time_the_largest_first() -> None:
    launches = table.parse(raw_page())
    assert sum(table.stall_shares(launches[0]).values()) == pytest.approx(100)
    rows = [row for row in table.table(launches).splitlines() if row.startswith("| warps")]
    assert rows == [
        "| warps wait: long scoreboard, % of their time | 60.0 | 80.0 |",
        "| warps wait: wait, % of their time | 29.0 | 9.0 |",
        "| warps issue, % of their time | 10.0 | 10.0 |",
    ]


def test_a_table_without_stalls() -> None:
    columns = [column for column in RAW if "issue_stalled" not in column[0]]
    text = table.table(table.parse(raw_page(columns)))
    assert "| time, µs | 12.6 | 47.1 |" in text and "warps wait" not in text


def test_a_table_without_a_metric_of_the_launch(tmp_path, capsys) -> None:
    columns = [column for column in RAW if column[0] != "launch__grid_size"]
    with pytest.raises(ValueError, match="expected the metric launch__grid_size"):
        table.table(table.parse(raw_page(columns)))
    path = tmp_path / "moe.csv"
    path.write_text(raw_page(columns), encoding="utf-8")
    assert table.main([str(path)]) == 1
    assert f"{path}: expected the metric launch__grid_size" in capsys.readouterr().err
    assert table.main([str(tmp_path / "absent.csv")]) == 1
    assert "absent.csv" in capsys.readouterr().err


def test_a_stall_reason_that_one_launch_lacks_gets_no_row() -> None:
    text = table.table(table.parse(raw_page(changed(STALL.format("wait"), "inst", "", "0.90"))))
    assert "long scoreboard" in text and "warps wait: wait" not in text


@pytest.mark.parametrize(
    "text",
    ["", "==ERROR== No kernels were profiled.\n", raw_page(launches=()),
     '"ID","Process ID","Section Name","Metric Name"\n"0","1","a","b"\n"0","1","a","c"\n'],
)  # fmt: skip
def test_other_texts_are_refused(text) -> None:
    with pytest.raises(ValueError, match="ncu --import REPORT --page raw --csv"):
        table.parse(text)


@pytest.mark.parametrize("name", ["", "warm-up"])
def test_a_launch_outside_the_ranges_is_refused(name) -> None:
    with pytest.raises(ValueError, match="launch 1: expected an NVTX range like 'M=8 experts=57'"):
        table.parse(raw_page(changed(RANGES, "", "M=1 experts=8", name)))
    without = [column for column in RAW if column[0] != RANGES]
    with pytest.raises(ValueError, match="NVTX range"):
        table.parse(raw_page(without))


def test_table_command_line(tmp_path, capsys) -> None:
    path = tmp_path / "moe.csv"
    path.write_text(raw_page(), encoding="utf-8")
    assert table.main([str(path)]) == 0
    assert capsys.readouterr().out == table.table(table.parse(raw_page()))
    path.write_text("nothing\n", encoding="utf-8")
    assert table.main([str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    assert table.main([]) == 2


def test_the_driver_names_its_ranges_as_the_table_reads_them() -> None:
    for tokens, experts in ((1, 8), (8, 57)):
        found = table.RANGE.search(driver.range_name(tokens, experts))
        assert (int(found[1]), int(found[2])) == (tokens, experts)
    assert not table.RANGE.search(driver.WARM_UP_RANGE)


def test_driver_command_line(capsys, monkeypatch) -> None:
    args = driver.parse_args(["--tokens", "1,8", "--launches", "6"])
    assert (args.tokens, args.launches, args.replays) == ((1, 8), 6, 0)
    assert driver.parse_args([]).tokens == tuple(range(1, 9))
    for wrong in (["--tokens", "9"], ["--launches", "0"], ["--replays", "-1"], ["--copies", "0"]):
        with pytest.raises(SystemExit):
            driver.parse_args(wrong)
        assert wrong[0] in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert driver.main(["--tokens", "1"]) == 2
    assert "cannot run here: needs an sm_90" in capsys.readouterr().out


class Wanted(dict):
    """Metrics that answer 1 to every question and note it."""

    def __missing__(self, name: str) -> float:
        self[name] = 1.0
        return 1.0


def test_the_script_asks_for_every_metric_of_the_table() -> None:
    text = (FOLDER / "ncu.sh").read_text(encoding="utf-8")
    asked = set(re.search(r"metrics=\((.*?)\)", text, re.DOTALL)[1].split())
    sections = set(re.search(r"sections=\((.*?)\)", text)[1].split())
    launch = table.Launch(1, 8, Wanted())
    for quantity in table.QUANTITIES:
        quantity.value(launch)
    assert set(launch.metrics) == asked
    assert {"WarpStateStats", "LaunchStats", "Occupancy"} <= sections


def run(script: str, *arguments: str, **variables: object) -> subprocess.CompletedProcess:
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    command = ["bash", str(FOLDER / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script, tool", [("ncu.sh", "NCU"), ("nsys.sh", "NSYS")])
def test_a_missing_profiler_is_named(script, tool, tmp_path) -> None:
    done = run(script, str(tmp_path / "out"), **{tool: tmp_path / "absent"})
    assert done.returncode == 3 and f"{tmp_path}/absent: not found" in done.stderr
    assert not (tmp_path / "out").exists()


def stand_in(path: Path, output: Path | None = None) -> Path:
    """A program that notes its arguments in calls.txt beside it and prints a file."""
    lines = ["#!/usr/bin/env bash", f'echo "{path.name} $*" >>"{path.parent}/calls.txt"']
    path.write_text("\n".join([*lines, f'cat "{output}"' if output else ""]), encoding="utf-8")
    path.chmod(0o755)
    return path


def test_ncu_script(tmp_path) -> None:
    (tmp_path / "page.csv").write_text(raw_page(), encoding="utf-8")
    ncu, python = stand_in(tmp_path / "ncu", tmp_path / "page.csv"), stand_in(tmp_path / "python")
    out = tmp_path / "out"
    done = run("ncu.sh", str(out), "--tokens", "1,8", NCU=ncu, PYTHON=python)
    assert done.returncode == 0, done.stderr
    compile_first, profile, export, show = (tmp_path / "calls.txt").read_text().splitlines()
    assert compile_first.startswith("python perf/nsight/driver.py --tokens 1 ")
    for option in ("--clock-control none", "--cache-control all", "-k regex:mono_moe", "--nvtx "):
        assert option in profile
    assert profile.endswith("perf/nsight/driver.py --copies 1 --tokens 1,8")
    assert f"--import {out}/moe.ncu-rep --page raw --csv" in export
    assert show == f"python perf/nsight/table.py {out}/moe.csv"
    assert (out / "moe.csv").read_text(encoding="utf-8") == raw_page()


def test_the_nvtx_filter_takes_the_measured_ranges_only() -> None:
    text = (FOLDER / "ncu.sh").read_text(encoding="utf-8")
    pattern = re.search(r"--nvtx-include 'regex:(.*?)/'", text)[1]
    assert re.match(pattern, driver.range_name(8, 57))
    assert not re.search(pattern, driver.WARM_UP_RANGE)


def test_nsys_script(tmp_path) -> None:
    nsys, python = stand_in(tmp_path / "nsys"), stand_in(tmp_path / "python")
    done = run("nsys.sh", str(tmp_path / "out"), "--tokens", "8", NSYS=nsys, PYTHON=python)
    assert done.returncode == 0, done.stderr
    _, profile, stats = (tmp_path / "calls.txt").read_text().splitlines()
    assert "--trace=cuda,nvtx" in profile and "--cuda-graph-trace=node" in profile
    assert re.search(r"driver\.py .*--replays \d+ --tokens 8$", profile)
    assert stats.endswith(f"{tmp_path}/out/moe.nsys-rep")
