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
    assert counts["LDSM"] == 4 * spec.h_blocks, "down weights that wait for h go to registers"
    products = 8 + 2 * 4 * spec.h_blocks  # a stage of an up unit; down from registers and ring
    assert counts["QGMMA"] == products, "unrolled, one accumulator each"
    assert counts["UTMALDG.5D"] == (2 if spec.interleave_up else 1)
    assert counts["UTMALDG"] == 2
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
