"""Adapters of other implementations, and the first calls and call times of the host mode."""

import builtins
import functools
import itertools
import json
import subprocess
import sys
import types

import bench_host
import bench_moe
import contest
import peers
import protocol
import pytest
import torch
from contest import Contestant, Options, Result
from moe_cases import E, K, N

from cute_moe import reference
from cute_moe.shapes import DEFAULT_SHAPE, SHAPES


@pytest.fixture(scope="module")
def weights() -> tuple[torch.Tensor, ...]:
    def draw(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        bits = torch.randint(0, 120, (E, rows, columns), dtype=torch.uint8)
        signs = torch.randint(0, 2, (E, rows, columns), dtype=torch.uint8) * 128
        scale = 1e-4 * (1.0 + torch.rand(E, rows // 128, columns // 128))
        return (bits + signs).view(reference.E4M3), scale

    return *draw(2 * N, K), *draw(K, N)


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, K).bfloat16(), torch.randn(tokens, E).bfloat16()


@pytest.mark.parametrize("tokens", [1, 3])
def test_plain_torch_is_the_layer(weights, tokens) -> None:
    peer = peers.plain_torch([weights], protocol.SHAPE)
    x, logits = inputs(tokens)
    out = torch.full_like(x, torch.nan)
    assert peer.call(x, logits, *peer.copies[0], out) is out
    error = reference.relative_error(out, reference.moe_fp32(x, logits, *weights, protocol.TOP_K))
    assert peer.unquantised and error < peer.max_error


def without_modules(monkeypatch, *names: str) -> None:
    """Makes the import of these packages fail, installed or not."""
    real = builtins.__import__

    def importing(name: str, *arguments: object, **options: object) -> object:
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", importing)


def test_peers_that_are_not_there_say_why(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.delenv(peers.FLASHINFER_SO, raising=False)
    monkeypatch.setattr(peers, "LIBRARY", tmp_path / "mono_moe.so")
    monkeypatch.setattr(peers, "TRITON_PEERS", tmp_path)
    without_modules(monkeypatch, "flashinfer")
    assert list(peers.find_peers(Options(), [])) == ["torch"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "flashinfer", "vllm_triton", "sglang_triton",
    ]  # fmt: skip
    reason = "ModuleNotFoundError: No module named 'flashinfer.jit.monomoe'"
    assert lines[0] == f"flashinfer: skipped, {reason}" and contest.SKIPPED["flashinfer"] == reason
    assert peers.find_peers(Options(peers=()), []) == {}
    assert capsys.readouterr().out == ""


def test_a_library_that_is_not_there(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv(peers.FLASHINFER_SO, str(tmp_path / "x.so"))
    assert peers.find_peers(Options(peers=("flashinfer",)), []) == {}
    assert "x.so: no such file" in capsys.readouterr().out


def test_versions_of_the_peers(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(peers.FLASHINFER_SO, str(tmp_path / "x.so"))
    assert peers.versions()[peers.FLASHINFER_SO] == "unknown build"
    (tmp_path / "x.txt").write_text("wheel, nvcc\n")
    assert peers.versions()[peers.FLASHINFER_SO] == "wheel, nvcc"
    monkeypatch.delenv(peers.FLASHINFER_SO)
    monkeypatch.setattr(peers, "LIBRARY", tmp_path / "x.so")
    assert peers.FLASHINFER_SO not in peers.versions(), "the note alone is no library"
    (tmp_path / "x.so").touch()
    assert peers.library() == tmp_path / "x.so"
    assert peers.versions()[peers.FLASHINFER_SO] == "wheel, nvcc"


def test_flashinfer_takes_one_shape() -> None:
    for name in set(SHAPES) - {DEFAULT_SHAPE}:
        assert peers.find_peers(Options(peers=("flashinfer",), shape_name=name), []) == {}
        assert contest.SKIPPED["flashinfer"].startswith("ValueError: shape: FlashInfer takes")


@pytest.mark.parametrize("name", ["sglang_triton", "vllm_triton"])
def test_triton_peers_have_a_pipeline_for_each_copy(monkeypatch, tmp_path, name) -> None:
    made = []

    def maker(*weights: torch.Tensor, top_k: int) -> object:
        made.append((weights, top_k))
        return lambda x, logits, out: out.fill_(float(weights[0][0]))

    module = types.ModuleType("triton_peers")
    setattr(module, name.replace("_triton", "_moe"), maker)
    monkeypatch.setitem(sys.modules, "triton_peers", module)
    monkeypatch.setattr(peers, "TRITON_PEERS", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = Options(peers=(name,), shape_name="qwen3-next")
    assert peers.find_peers(options, []) == {}, "without the file nothing is imported"
    (tmp_path / "triton_peers.py").touch()
    copies = [tuple(torch.full((2,), 4.0 * i + j) for j in range(4)) for i in range(2)]
    peer = peers.find_peers(options, copies)[name]
    out = torch.empty(3)
    for copy in peer.copies:
        assert peer.call(out, out, *copy, out) is out and (out == copy[0][0]).all()
    assert [top_k for _, top_k in made] == [10, 10]
    assert all(
        a is b
        for (got, _), c in zip(made, copies, strict=True)
        for a, b in zip(got, c, strict=True)
    )


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError])
def test_an_adapter_that_fails_costs_its_peer_only(monkeypatch, capsys, error) -> None:
    def adapter(copies: object, shape: object) -> peers.Peer:
        raise error("another signature")

    monkeypatch.setattr(peers, "ADAPTERS", {"other": adapter, "torch": peers.plain_torch})
    assert list(peers.find_peers(Options(), [])) == ["torch"]
    assert capsys.readouterr().out.startswith(f"other: skipped, {error.__name__}: ")


def test_flashinfer_gets_its_own_layout(monkeypatch, weights) -> None:
    calls = []
    monkeypatch.setattr(peers, "_flashinfer_functions", lambda: (lambda *a: calls.append(a), 64))
    peer = peers.flashinfer([weights], protocol.SHAPE)
    x, logits = inputs(1)
    out = torch.empty_like(x)
    assert peer.call(x, logits, *peer.copies[0], out) is out
    (arguments,) = calls
    assert arguments[6] is out and arguments[7].shape == (64,) and not arguments[7].any()
    assert arguments[8:] == (protocol.TOP_K, 1, True)
    up = arguments[2].view(torch.uint8)
    raw = weights[0].view(torch.uint8)
    assert torch.equal(up[:, :8], raw[:, :8]) and torch.equal(up[:, 8:16], raw[:, N : N + 8])
    assert all(a is b for a, b in zip(arguments[3:6], weights[1:], strict=True))


def test_a_contestant_checks_what_the_peer_returned(weights) -> None:
    x, logits = inputs(2)
    want = reference.moe_block_fp8(x, logits, *weights, protocol.TOP_K)
    case = bench_moe.Case(2, "uniform", [x], [logits], [[0]], [want], [3 * want], 1, protocol.SHAPE)

    def layer(factor: float, unquantised: bool = False) -> Contestant:
        peer = peers.Peer(lambda *tensors: want * factor, [weights], 0.01, unquantised)
        return bench_moe.layer_contestant(case, peer)

    for factor, check in ((1.0, "ok"), (2.0, "1 of 1 wrong, error 1")):
        contestant = layer(factor)
        contestant.launches[0]()
        assert contestant.check().startswith(check)
    contestant.poison()
    assert contestant.check() == "1 of 1 wrong, error nan"
    for factor, passed in ((1.0, False), (3.0, True)):
        contestant = layer(factor, unquantised=True)
        contestant.launches[0]()
        assert (contestant.check() == "ok") is passed


def test_call_times_are_per_call(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = itertools.count()
    monkeypatch.setattr(bench_host.time, "perf_counter", lambda: next(clock) * 32e-6)
    log = []
    calls = {name: functools.partial(log.append, name) for name in "ab"}
    times = bench_host.call_times(calls, bursts=4)
    assert times == {name: pytest.approx([32.0 / bench_host.BURST] * 4) for name in "ab"}
    bursts = ["a"] * bench_host.BURST + ["b"] * bench_host.BURST
    assert log == bursts * (4 + protocol.WARM_UP_REPLAYS)


def test_first_calls_share_one_cache(monkeypatch) -> None:
    caches = []

    def run(command: list[str], env: dict[str, str], **_: object) -> types.SimpleNamespace:
        assert command[0] == sys.executable
        caches.append(env["CUTE_MOE_CACHE_DIR"])
        check = "ok" if len(caches) < 4 else "wrong"
        found = {"call": 100.0 * len(caches), "import": 7.0, "check": check}
        return types.SimpleNamespace(returncode=0, stdout="remark\n" + json.dumps(found))

    monkeypatch.setattr(subprocess, "run", run)
    results = bench_host.start_results(starts=2)
    assert caches[0] == caches[1] != caches[2] == caches[3]
    assert results == {
        "first call, cold JIT": Result([100.0, 300.0], "ok"),
        "first call, warm disk cache": Result([200.0, 400.0], "wrong"),
        "import of the compiler": Result([7.0, 7.0], protocol.NOTHING_TO_CHECK),
    }


def test_a_first_call_that_fails_is_an_error(monkeypatch) -> None:
    failed = types.SimpleNamespace(returncode=1, stdout="", stderr="no GPU")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="no GPU"):
        bench_host.in_new_process("folder")
