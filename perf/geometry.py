"""What the kernel makes of each shape: `python perf/geometry.py` writes the table of design.md.

With `--check`, 1 when the table there says something else.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cute_moe.kernels.moe.spec import MoeSpec
from cute_moe.shapes import SHAPES, LayerShape

DESIGN = Path(__file__).resolve().parent.parent / "docs" / "design.md"
BLOCK = re.compile(r"(<!-- geometry -->\n).*?(<!-- /geometry -->)", re.DOTALL)
COLUMNS: Mapping[str, Callable[[MoeSpec], object]] = {
    "E, K, N, k": lambda s: f"{s.num_experts}, {s.hidden}, {s.intermediate}, {s.top_k}",
    "unit rows": lambda s: s.rows,
    "units an expert": lambda s: s.units_per_expert,
    "stages a unit": lambda s: s.unit_stages,
    "columns": lambda s: s.columns,
    "column blocks": lambda s: s.column_blocks,
    "group": lambda s: s.group,
    "steps": lambda s: s.steps,
    "blocks a step": lambda s: s.step_blocks,
    "stages a step": lambda s: s.step_stages,
    "slices": lambda s: s.slices,
    "stages": lambda s: s.stages,
    "slots of h": lambda s: s.h_slots,
    "most slots in use": lambda s: s.max_chunks * s.slices,
    "groups at once": lambda s: s.groups_at_once,
    "shared KB": lambda s: f"{s.smem_bytes / 1024:.0f}",
    "h KB": lambda s: f"{dict(s.scratch_regions)['h'] / 1024:.0f}",
}


def spec_of(shape: LayerShape, grid: int = 132) -> MoeSpec:
    """The kernel of a shape with blocks of 128."""
    return MoeSpec(shape.num_experts, shape.hidden, shape.intermediate, shape.top_k, grid=grid)


def table() -> str:
    """One line a size, one column a shape."""
    specs = [spec_of(shape) for shape in SHAPES.values()]
    lines = [["", *SHAPES], ["---", *["---:"] * len(specs)]]
    lines += [[name, *(f"{size(spec)}" for spec in specs)] for name, size in COLUMNS.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written(text: str) -> str:
    """design.md with the table of now. Raises ValueError where it has no place for it."""
    result, count = BLOCK.subn(lambda found: found[1] + table() + found[2], text)
    if count != 1:
        raise ValueError(f"design.md: expected one <!-- geometry --> block, got {count}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(prog="perf/geometry.py", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    text = DESIGN.read_text(encoding="utf-8")
    new = written(text)
    if not check:
        DESIGN.write_text(new, encoding="utf-8")
    return int(check and new != text)


if __name__ == "__main__":
    sys.exit(main())
