"""Runs before and after a change: what counts as worse, and what is said about it."""

from dataclasses import replace
from pathlib import Path

import compare
import protocol
import pytest
from perf_rows import example_rows, make_row


def write(path: Path, rows: list[protocol.Row]) -> str:
    content = protocol.to_json({"gpu": "G"}, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(protocol.to_text(content), encoding="utf-8")
    return str(path)


def runs(folder: Path, *ratios: float, contestant: str = "cute_moe") -> list[str]:
    """Runs of one row with these ratios to the floor, which took 12 µs in each."""
    return [
        write(folder / f"{i}.json", [make_row(contestant, 15.0, of_floor=ratio)])
        for i, ratio in enumerate(ratios)
    ]


@pytest.mark.parametrize(
    "ratios, code",
    [
        ((1.2, 1.2), 0),
        ((1.2, 1.21), 0),  # 0.8 %: below the limit
        ((1.2, 1.22), 1),
        ((1.22, 1.2), 0),  # better
        ((1.20, 1.20, 1.22, 1.22), 1),
        ((1.20, 1.23, 1.23, 1.24), 0),  # means rose by 1.6 %, the runs before lie 2.5 % apart
        ((1.20, 1.20, 1.20, 1.28), 0),  # 3.3 %, but the runs after lie 6.7 % apart
        ((1.20, 1.21, 1.25, 1.25), 1),  # 3.7 % is more than 0.8 %
    ],
)
def test_worse_is_more_than_the_limit_and_than_the_spread(tmp_path, capsys, ratios, code) -> None:
    assert compare.main(runs(tmp_path, *ratios)) == code
    out = capsys.readouterr().out
    assert ("1 WORSE than before" in out) is bool(code)
    assert ("none of ours worse, of 1 ratios and 0 times" in out) is not code


def test_rows_of_different_shapes_are_different_rows(tmp_path, capsys) -> None:
    """Files from before the shapes had names are of the default one."""
    ours = make_row("cute_moe", 15.0, of_floor=1.2)
    old, new = replace(ours, shape=None), replace(ours, shape="qwen3-next")
    paths = [write(tmp_path / f"{i}.json", [row]) for i, row in enumerate((old, ours, new))]
    assert compare.main(paths[:2]) == 0
    assert compare.main([paths[0], paths[2]]) == 2
    assert compare.place_of(new) == "qwen3-next M=2 uniform"


def test_limits_can_be_given(tmp_path) -> None:
    paths = runs(tmp_path, 1.2, 1.22)
    assert compare.main([*paths, "--limit", "0.02"]) == 0
    assert compare.main([*paths, "--limit", "0.001"]) == 1


def test_times_without_a_ratio_have_a_limit_of_their_own(tmp_path, capsys) -> None:
    def run(name: str, us: float) -> str:
        fields = dict(op="host", case="call of mono_moe", routing="none", cache="eager", bytes=0)
        return write(tmp_path / name, [make_row("cute_moe", us, None, **fields)])

    before, near, far = run("a.json", 8.0), run("b.json", 8.3), run("c.json", 8.5)
    assert compare.main([before, near]) == 0
    assert compare.main([before, far]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "call of mono_moe" in out and "+6.25%" in out and "8 µs" in out
    assert compare.main([before, far, "--time-limit", "0.1"]) == 0


def test_only_ours_can_be_worse(tmp_path, capsys) -> None:
    ours = make_row("cute_moe_bf16", 15.0, of_floor=1.3)
    paths = []
    for i, ratio in enumerate((2.0, 3.0)):
        theirs = make_row("flashinfer", 30.0, of_floor=ratio)
        paths.append(write(tmp_path / f"{i}.json", [ours, theirs]))
    assert compare.main(paths) == 0
    assert "+50.00%" in capsys.readouterr().out


def test_folders_of_results_are_one_run(tmp_path) -> None:
    for name, ratio in (("a", 1.2), ("b", 1.2), ("c", 1.3)):
        write(tmp_path / name / "moe.json", [make_row("cute_moe", 15.0, of_floor=1.2)])
        dispatch = make_row("cute_moe", 5.0, None, op="dispatch", case="small", routing="none",
                            of_floor=ratio)  # fmt: skip
        write(tmp_path / name / "dispatch.json", [dispatch])
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert compare.main([a, b]) == 0 and compare.main([a, c]) == 1


def test_rows_without_a_partner_are_counted(tmp_path, capsys) -> None:
    rows = example_rows()
    full, few = write(tmp_path / "all.json", rows), write(tmp_path / "few.json", rows[:2])
    assert compare.main([full, few]) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert f"rows only in {full}: 3 (cute_moe 2, empty 1)" in out
    assert f"rows only in {few}: 0" in out


@pytest.mark.parametrize("count", [1, 3])
def test_an_odd_number_of_runs_is_refused(tmp_path, capsys, count) -> None:
    with pytest.raises(SystemExit):
        compare.main(runs(tmp_path, *[1.2] * count))
    assert f"as many runs before as after, got {count}" in capsys.readouterr().err


def test_what_cannot_be_read_or_is_wrong_is_named(tmp_path, capsys) -> None:
    good = runs(tmp_path, 1.2)[0]
    (tmp_path / "empty").mkdir()
    failed = replace(make_row("cute_moe", 15.0, of_floor=1.0), check="3 of 24 wrong")
    bad = write(tmp_path / "bad.json", [failed])
    for path, text in ((str(tmp_path / "empty"), "expected results files, got none"),
                       (str(tmp_path / "absent.json"), "absent.json"),
                       (bad, "cute_moe, M=2 uniform: 3 of 24 wrong")):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            compare.main([good, path])
        assert ended.value.code == 2 and text in capsys.readouterr().err


def test_nothing_in_common(tmp_path, capsys) -> None:
    ours = write(tmp_path / "a.json", [make_row("cute_moe", 15.0, of_floor=1.2)])
    other = write(tmp_path / "b.json", [make_row("cute_moe", 15.0, 3, of_floor=1.2)])
    assert compare.main([ours, other]) == 2
    assert "no rows of ours in common" in capsys.readouterr().out
