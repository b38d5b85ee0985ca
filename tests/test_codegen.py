"""Compile checks of every kernel for sm_90a: no GPU needed."""

import pytest

from cute_moe.host.compile import compile_report
from cute_moe.kernels.device.sizes import SMEM_LIMIT
from cute_moe.kernels.moe.spec import MoeSpec
from cute_moe.kernels.registry import kernels


@pytest.mark.parametrize("name, spec, build", kernels(), ids=[name for name, _, _ in kernels()])
def test_machine_code(name, spec, build) -> None:
    report = compile_report(spec, build)
    counts = report.counts
    assert report.spill_bytes == 0
    assert report.stack_bytes == 0
    assert not counts["LDL"] and not counts["STL"], "local memory"
    assert report.smem_bytes == spec.smem_bytes <= SMEM_LIMIT
    if isinstance(spec, MoeSpec):
        check_moe(report, spec)
    if type(spec).__module__ == "cute_moe.kernels.dispatch.spec":
        check_dispatch(report, spec)


def check_moe(report, spec: MoeSpec) -> None:
    counts = report.counts
    assert counts[f"QGMMA.64x{8 * spec.terms}x32"] == counts["QGMMA"] > 0
    from_registers = spec.weights_in_registers and spec.slices == 1
    loads = 4 * spec.steps * spec.step_blocks if from_registers else 0
    assert counts["LDSM"] == loads, "down weights that wait for h go to registers"
    ways = 2 if from_registers else 1
    ways += 2 if spec.groups_at_once == 2 else 0
    products = 4 * spec.stage_blocks + ways * 4 * spec.slice_blocks
    assert counts["QGMMA"] == products, "unrolled, one accumulator each"
    boxes = 1 if spec.whole_blocks else spec.step_blocks
    # Up units: the first one, and those in pairs; their gate and up scales.
    assert counts["UTMALDG"] == 2 + boxes
    assert counts["UBLKCP"] == (2 * 2 if spec.unit_scale_bytes % 16 == 0 else 0)
    assert counts["USETMAXREG"] == 3, "one per role branch"
    assert not counts["REDG"] and not counts["ATOMG"], "atomics in global memory"
    # Consumers, producer, lists, clearing, loaders: every role that touches global memory waits.
    assert counts["ACQBULK"] == (5 if spec.programmatic else 0)
    assert counts["PREEXIT"] == (1 if spec.programmatic else 0)


def check_dispatch(report, spec) -> None:
    counts = report.counts
    if getattr(spec, "vector", 0) == 16:
        assert counts["STG.E.128"] > 0
    assert bool(counts["UBLKCP"]) == getattr(spec, "bulk", False)
    assert counts["ACQBULK"] == counts["PREEXIT"] == 1, "programmatic launch"
    assert not counts["REDG"] and not counts["ATOMG"], "atomics in global memory"
