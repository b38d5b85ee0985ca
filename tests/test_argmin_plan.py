"""Launch geometry and machine code of argmin and argmax; no GPU needed."""

import random

import pytest

from cute_moe.host.compile import compile_report
from cute_moe.kernels.argmin.kernel import build
from cute_moe.kernels.argmin.spec import (
    ITEM_BYTES,
    LINE_BYTES,
    STAGE_BYTES,
    STAGE_STRIDE,
    THREADS,
    plan,
)


def random_sizes() -> tuple[int, int, int]:
    """[outer, reduce, inner] from one element to as many as a GPU can hold with the result."""
    while True:
        sizes = [round(2 ** random.uniform(0, 34)) for _ in range(3)]
        outer, reduce, inner = (1 if random.random() < 0.25 else size for size in sizes)
        if outer * inner * (2 * reduce + 8) <= 1 << 37:
            return outer, reduce, inner


def test_plans_cover_everything() -> None:
    kinds = set()
    for _ in range(20_000):
        outer, reduce, inner = random_sizes()
        dtype = random.choice(list(ITEM_BYTES))
        item = ITEM_BYTES[dtype]
        address = item * random.randrange(16 // item)
        made = plan(outer, reduce, inner, dtype, False, address, random.choice([1, 78, 132]))
        scan, walk = made.scan, made.walk
        kinds.add((scan.kind, scan.vector, walk.splits > 1))
        label = f"{outer, reduce, inner, dtype, address}: {made}"
        assert walk[:3] == (outer, reduce, inner), label
        steps = max(reduce // scan.vector, 1) if scan.kind == "rows" else reduce
        assert walk.chunk * (walk.splits - 1) < steps <= walk.chunk * walk.splits, label
        assert 0 < walk.chunk < 2**31 - scan.threads, label
        assert 0 < walk.tx * walk.ty * walk.tz <= scan.threads, label
        assert walk.tiles * walk.splits * -(-outer // walk.tz) < 2**31, label
        assert made.outputs == outer * inner, label
        assert 0 < made.combine_tx <= THREADS, label
        assert 2 * made.pair_words >= 3 * walk.splits * made.outputs, label
        if scan.kind == "rows":
            assert inner == 1 and scan.vector * item == 16, label
            assert walk.tx == walk.tiles == scan.columns == 1, label
            assert walk.ty in (8, 16, 32, THREADS), label
            assert 2 * scan.vector - 2 <= walk.ty, label
            continue
        width = walk.tx * scan.columns * scan.vector
        assert width * (walk.tiles - 1) < inner <= width * walk.tiles, label
        assert walk.tiles == 1 or walk.tz == 1, label
        if scan.kind == "columns":
            size = scan.vector * item
            assert address % size == 0 and inner * item % size == 0, label
        else:
            row_bytes = min(width, inner) * item
            assert walk.tz == 1 and walk.depth * row_bytes <= STAGE_BYTES, label
            assert walk.depth == 1 or walk.tiles == 1, label
            # The copy of a stage that starts at the last place of a line where an element can.
            granules = -(-(walk.depth * row_bytes + 16 - item) // 16)
            assert LINE_BYTES - 16 + 16 * granules <= STAGE_STRIDE, label
    assert len(kinds) == 12, kinds


@pytest.mark.parametrize(
    "sizes, opcode, count",
    [
        ((4, 4095, 1), "LDG.E.128", 2),  # rows that begin anywhere
        ((4, 100, 256), "LDG.E.128", 2),
        ((128, 4096, 4095), "UBLKCP", 1),
    ],
    ids=["rows", "columns", "stream"],
)
def test_machine_code(sizes, opcode, count) -> None:
    """Loads have 16 bytes, and both copies of the loop issue `unroll` of them; or bulk copies."""
    scan = plan(*sizes, "float32", False, 4 if sizes[2] == 1 else 0, 132).scan
    report = compile_report(scan, lambda options: build(scan, options))
    assert report.counts[opcode] == count * scan.unroll
    assert report.smem_bytes == scan.smem_bytes
    assert not report.uses_local_memory
