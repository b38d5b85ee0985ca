"""Compile checks of every kernel for sm_90a: no GPU needed."""

import pytest

from cute_moe.host.compile import compile_report
from cute_moe.kernels.registry import kernels

SMEM_LIMIT = 227 * 1024


@pytest.mark.parametrize("name, spec, build", kernels(), ids=[name for name, _, _ in kernels()])
def test_machine_code(name, spec, build) -> None:
    report = compile_report(spec, build)
    counts = report.counts
    assert report.spill_bytes == 0
    assert report.stack_bytes == 0
    assert not counts["LDL"] and not counts["STL"], "local memory"
    assert report.smem_bytes <= SMEM_LIMIT
    assert report.smem_bytes == spec.smem_bytes
    assert counts["QGMMA.64x8x32"] > 0
    assert counts["UTMALDG.5D"] == (2 if spec.raw_rows else 1)
    assert counts["UTMALDG"] == 2
    assert counts["USETMAXREG"] == 3, "one per role branch"
    assert not counts["REDG"] and not counts["ATOMG"], "atomics in global memory"
