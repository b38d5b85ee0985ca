"""The counts that the models of the MoE kernel's protocols have, from the kernel's own code.

Arrivals are what its initialisation of the mbarriers asks for, run here with a recorder in the
compiler's place; everything else follows from a `MoeSpec` and the constants of the modules.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from cute_moe.kernels.moe import memory
from cute_moe.kernels.moe.down import REGISTER_GROUPS
from cute_moe.kernels.moe.handover import ROW_LANES
from cute_moe.kernels.moe.memory import CONSUMER_WARPS, FEW_CHUNKS
from cute_moe.kernels.moe.spec import MAX_CHUNKS, MoeSpec

CHUNK = 8  # rows of a chunk: the N of one WGMMA
WARP = 32
GROUP_STAGES = 2  # of one group in one column block
CONSUMERS = 2  # warpgroups that take units and groups in turn


@dataclass(frozen=True)
class _Address:
    """An mbarrier as the kernel names it: a field of its shared memory, and an offset."""

    field: str
    index: int

    def __add__(self, index: int) -> _Address:
        return _Address(self.field, self.index + index)


def plain(name: str, **meanings: object) -> Callable:
    """A function of memory.py as plain Python, where some names have other meanings.

    From its text: the compiler rewrites the functions that it has compiled.
    """
    module = ast.parse(Path(memory.__file__).read_text(encoding="utf-8"))
    (function,) = (n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == name)
    function.decorator_list = []
    only_it = ast.Module([function], [])
    namespace = vars(memory) | meanings
    exec(compile(only_it, name, "exec", flags=annotations.compiler_flag), namespace)
    return namespace[name]


def arrivals(spec: MoeSpec) -> dict[str, list[int]]:
    """Arrivals that end a phase, of every mbarrier of each field of `memory.Shared`."""
    counts: dict[str, dict[int, int]] = {}

    def init(address: _Address, count: int) -> None:
        counts.setdefault(address.field, {})[address.index] = count

    arch = mock.Mock(mbarrier_init=init, elect_one=contextlib.nullcontext)
    meanings = {
        "cute": SimpleNamespace(arch=arch),
        "cutlass": SimpleNamespace(range_constexpr=range),
    }
    shared = mock.Mock()
    shared.configure_mock(**{name: _Address(name, 0) for name in memory.Shared.__annotations__})
    for name in ("init_stream_barriers", "init_barriers"):
        plain(name, **meanings)(shared, spec)
    return {field: [of[i] for i in range(len(of))] for field, of in counts.items()}


def only(counts: list[int]) -> int:
    """The number that all of them are."""
    (count,) = set(counts)
    return count


def weight_ring(spec: MoeSpec) -> dict[str, int]:
    """For test_weight_ring_model.py, whose step is two stages."""
    return {
        "stages": spec.stages // GROUP_STAGES,
        "unit_steps": spec.unit_stages // GROUP_STAGES,
        "columns": spec.max_own_columns,
        "arrivals": only(arrivals(spec)["empty"]),
        "warps": CONSUMER_WARPS // CONSUMERS,
        "register_groups": REGISTER_GROUPS,
        "early_chunks": FEW_CHUNKS if spec.two_groups_fit else 0,
    }


def h_ring(spec: MoeSpec) -> dict[str, int]:
    """For test_h_ring_model.py; `uses` of a slot at most, `together`: rows a warp takes at once."""
    counts = arrivals(spec)
    return {
        "uses": -(-MAX_CHUNKS // spec.h_slots),
        "places": CHUNK,
        "row_arrivals": ROW_LANES,
        "ready_arrivals": only(counts["h_ready"]),
        "free_arrivals": only(counts["h_free"]),
        "warps": CONSUMER_WARPS // CONSUMERS,
        "together": WARP // ROW_LANES,
    }


def handover(spec: MoeSpec) -> dict[str, int]:
    """For test_handover_model.py: buffers of h, and epoch words that every grid leaves unused."""
    size = dict(spec.scratch_regions)
    epochs = size["epoch"] // 4
    return {"buffers": size["h"] // (4 * spec.h_words), "spare_epochs": epochs - spec.grid}
