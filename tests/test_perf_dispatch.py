"""The dispatch benchmark: contestants that compute the right thing, and checks that can fail."""

import bench_dispatch
import protocol
import pytest
import torch
from contest import Options

SMALL = {
    "dispatch in turn": bench_dispatch.dispatch_case(64, 16, torch.float32, 4, False),
    "dispatch mixed": bench_dispatch.dispatch_case(64, 16, torch.bfloat16, 4, True),
    "indices": bench_dispatch.indices_case(32, 2, 8),
    "permute": bench_dispatch.permute_case(32, 2, 8, 16),
    "combine": bench_dispatch.combine_case(32, 2, 8, 16),
}


@pytest.mark.parametrize("name", SMALL)
def test_contestants_are_right_and_checks_can_fail(name: str, monkeypatch) -> None:
    monkeypatch.setattr(bench_dispatch, "DEVICE", "cpu")
    entries = SMALL[name](Options(peers=("torch",)))
    assert len(entries.calls) >= 2 and "cute_moe" in entries.calls
    for call in entries.calls.values():
        contestant = bench_dispatch.contestant(call, entries.want, 3, entries.tolerance)
        assert len(contestant.launches) == 3
        contestant.launches[0]()
        assert contestant.check() == protocol.OK
        contestant.poison()
        assert contestant.check() == "wrong result"
        contestant.launches[1]()
        assert contestant.check() == protocol.OK


@pytest.mark.parametrize("name", SMALL)
def test_every_result_is_checked(name: str, monkeypatch) -> None:
    monkeypatch.setattr(bench_dispatch, "DEVICE", "cpu")
    entries = SMALL[name](Options(peers=("torch",)))
    for call in entries.calls.values():
        results = call()
        contestant = bench_dispatch.contestant(
            lambda results=results: results, entries.want, 1, entries.tolerance
        )
        contestant.launches[0]()
        for result in results if isinstance(results, tuple) else (results,):
            right = result.clone()
            result.view(torch.uint8).fill_(bench_dispatch.POISON)
            assert contestant.check() == "wrong result"
            result.copy_(right)
            assert contestant.check() == protocol.OK


def test_copy_moves_the_bytes_of_the_case(monkeypatch) -> None:
    monkeypatch.setattr(bench_dispatch, "DEVICE", "cpu")
    contestant = bench_dispatch.copy_contestant(1000, 2)
    contestant.launches[0]()
    assert contestant.check() == protocol.OK
    contestant.poison()
    assert contestant.check() != protocol.OK


def test_bytes_of_a_case(monkeypatch) -> None:
    monkeypatch.setattr(bench_dispatch, "DEVICE", "cpu")
    nbytes = {name: make(Options(peers=())).nbytes for name, make in SMALL.items()}
    assert nbytes["dispatch in turn"] == 2 * 64 * 16 * 4
    assert nbytes["permute"] == nbytes["combine"] == 3 * 32 * 16 * 2
    assert nbytes["indices"] == 64 * (8 + 4 + 4)


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in bench_dispatch.CASES]
    assert len(set(names)) == len(names)
    assert 0 < sum(case.quick for case in bench_dispatch.CASES) < len(names)
