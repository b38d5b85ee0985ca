"""Cross-CTA barriers: the code that they become (CPU) and a stress test of them alone (GPU)."""

import re
import tempfile

import numpy as np
import pytest
import torch
from barrier_kernels import (
    BUFFERS,
    LANES,
    MODES,
    SLOTS,
    RelaySpec,
    build_relay,
    model_relay,
)

from cute_moe.host.compile import compile_cached, compile_report
from cute_moe.kernels.device.barrier import POLL_LIMIT, SLOT_WORDS, Threads, seed_increment

LAUNCHES = 5


def spec_of(mode: str, ctas: int) -> RelaySpec:
    return RelaySpec(mode, ctas, {"expert": 4, "stripe": 2}.get(mode, 0))


def ptx_of(spec: RelaySpec) -> str:
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
        return build_relay(spec, options).__ptx__


def ordered(text: str, *patterns: str) -> bool:
    """Whether the patterns are found in `text` one after the other."""
    return re.search(r".*?".join(patterns), text, re.DOTALL) is not None


@pytest.mark.parametrize("count", [1, 2, 3, 132, 1 << 16])
def test_increments_of_a_round_flip_the_sense(count: int) -> None:
    assert -(1 << 31) <= seed_increment(count) < 1 << 31
    assert (seed_increment(count) + count - 1) % (1 << 32) == 1 << 31


@pytest.mark.parametrize(
    "arguments", [(32,), (0, 48, 1), (16, 32, 1), (0, 64, 0), (0, 64, 16), (0, None, 3)], ids=str
)
def test_thread_groups_are_checked(arguments: tuple) -> None:
    with pytest.raises(ValueError):
        Threads(*arguments)


def test_ptx_of_the_grid_barrier() -> None:
    """Release and acquire at GPU scope, and the plain accesses stay on their side of them."""
    ptx = ptx_of(spec_of("grid", 8))
    assert ordered(
        ptx,
        r"st\.global\.b32",  # The cell,
        r"bar\.sync\s+0",
        # (without a scope an atom has .gpu)
        r"atom\.global\.acq_rel(\.gpu)?\.add",
        r"ld\.acquire\.gpu\.global",
        r"trap;",
        r"bar\.sync\s+0",
        r"ld\.global\.b32",  # the other CTA's cell, loaded after the barrier,
        r"st\.global\.b32",  # and the state.
    )
    assert str(POLL_LIMIT - 1) in ptx
    assert ptx.count("ld.acquire.gpu") == 1
    assert ptx.count("bar.sync") == 2
    assert "membar" not in ptx and "fence" not in ptx


def test_ptx_of_signal() -> None:
    ptx = ptx_of(spec_of("signal", 8))
    assert ordered(ptx, r"red\.release\.gpu\.global\.add", r"ld\.acquire\.gpu\.global", r"trap;")
    assert "atom." not in ptx


def test_ptx_of_a_named_barrier() -> None:
    ptx = ptx_of(spec_of("uneven", 8))
    assert re.findall(r"bar\.sync\s+([^;]*);", ptx) == ["1, 32"] * 2


@pytest.mark.parametrize("mode", MODES)
def test_compiles_clean(mode: str) -> None:
    """No local memory, and an acquire that empties L1: plain loads after the barrier are fresh."""
    spec = spec_of(mode, 8)
    report = compile_report(spec, lambda options: build_relay(spec, options))
    assert not report.uses_local_memory
    assert report.spill_bytes == 0
    assert report.counts["MEMBAR"] >= 1
    assert report.counts["CCTL.IVALL"] >= 1


def test_single_member_costs_no_memory_traffic() -> None:
    spec = RelaySpec("expert", 8, 1)
    ptx = ptx_of(spec)
    assert "atom." not in ptx and "ld.acquire" not in ptx


def start_states(ctas: int) -> np.ndarray:
    return np.arange(ctas * LANES, dtype=np.uint32).reshape(ctas, LANES) * np.uint32(2654435761)


def run_relay(spec: RelaySpec, rounds: int, device: torch.device) -> np.ndarray:
    """The states after LAUNCHES launches of `rounds` rounds on the same slots."""
    relay = compile_cached(spec, lambda options: build_relay(spec, options))
    slots = torch.zeros(SLOTS * SLOT_WORDS, dtype=torch.int32, device=device)
    cells = torch.zeros(BUFFERS, spec.ctas, LANES, dtype=torch.int32, device=device)
    states = torch.from_numpy(start_states(spec.ctas).view(np.int32)).to(device)
    for launch in range(LAUNCHES):
        relay(slots, cells, states, launch * rounds, rounds)
    torch.cuda.synchronize(device)
    low_bits = slots & 0x7FFFFFFF
    assert not low_bits.any(), "a slot was left with a count in it"
    return states.cpu().numpy().view(np.uint32)


def check_relay(spec: RelaySpec, rounds: int, device: torch.device) -> None:
    if torch.cuda.get_device_properties(device).multi_processor_count < spec.ctas:
        pytest.skip(f"fewer than {spec.ctas} SMs")
    states = run_relay(spec, rounds, device)
    expected = model_relay(spec, start_states(spec.ctas), LAUNCHES * rounds)
    wrong = np.argwhere(states != expected)
    assert not len(wrong), f"{len(wrong)} of {states.size} states differ, first at {wrong[0]}"


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [2, 8, 132])
def test_grid_barrier_stress(cuda: torch.device, ctas: int) -> None:
    """Over 100 000 rounds; an odd number per launch leaves either sense behind."""
    check_relay(spec_of("grid", ctas), 20_001, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "grid"])
@pytest.mark.parametrize("ctas", [8, 132])
def test_barriers_stress(cuda: torch.device, mode: str, ctas: int) -> None:
    """Disjoint groups, groups of different size, split form, signals, watchers."""
    check_relay(spec_of(mode, ctas), 3_001, cuda)
