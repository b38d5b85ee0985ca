"""The counts that the models of the MoE kernel's protocols have, from the kernel's own code.

Arrivals are those of the kernel's rings, and what its initialisation of the mbarriers asks for, run
here with a recorder in the compiler's place; everything else follows from a `MoeSpec`.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from cute_moe.kernels.device import ring
from cute_moe.kernels.device.ring import Ring
from cute_moe.kernels.moe import memory
from cute_moe.kernels.moe.memory import CONSUMER_WARPS, HALF_WARPS, LOADER_WARPS
from cute_moe.kernels.moe.spec import HALVES, SCALE_BATCHES, MoeSpec

assert HALF_WARPS * HALVES == CONSUMER_WARPS


@dataclass(frozen=True)
class Address:
    """An mbarrier by its place among all of them."""

    index: int

    def __add__(self, index: int) -> Address:
        return Address(self.index + index)


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


def rings(spec: MoeSpec) -> tuple[Ring, Ring, Ring, Address, Address, Address]:
    """(weights, slots of h, down scales, lists, gate, landed) of the kernel's shared memory."""
    return plain("_make_rings")(Address(0), spec)


def arrivals(spec: MoeSpec) -> dict[int, int]:
    """Arrivals that end a phase of every mbarrier that the kernel initialises, by its place."""
    counts: dict[int, int] = {}

    def init(address: Address, count: int) -> None:
        assert address.index not in counts, "initialised twice"
        counts[address.index] = count

    arch = mock.Mock(mbarrier_init=init, elect_one=contextlib.nullcontext)
    cute = SimpleNamespace(arch=arch)
    names = ("weights", "h_slots", "scale_slots", "lists", "gate", "landed")
    shared = SimpleNamespace(**dict(zip(names, rings(spec), strict=True)))
    with mock.patch.object(ring, "cute", cute):
        for name in ("init_stream_barriers", "init_barriers"):
            plain(name, cute=cute)(shared, spec)
    return counts


def weight_ring(spec: MoeSpec) -> dict[str, int]:
    """For test_weight_ring_model.py."""
    weights, h_slots, *_ = rings(spec)
    return {
        "stages": weights.stages,
        "unit_stages": spec.unit_stages,
        "scale_slots": spec.unit_scale_slots,
        "step_stages": spec.step_stages,
        "slice_steps": spec.slice_steps,
        "slices": spec.slices,
        "columns": spec.max_own_blocks,
        "arrivals": weights.readers,
        "slot_arrivals": h_slots.readers,
        "warps": HALF_WARPS,
        "slots_reused": spec.slots_reused,
        "run": spec.groups_at_once,
    }


def h_ring(spec: MoeSpec) -> dict[str, int]:
    """For test_h_ring_model.py: arrivals of a loader and of a consumer, and those that count."""
    _, h_slots, *_ = rings(spec)
    return {
        "loader_arrivals": memory.WARP,
        "ready_arrivals": h_slots.writers // LOADER_WARPS,  # for each loader
        "warps": HALF_WARPS,
        "free_arrivals": h_slots.readers,
    }


def scale_ring(spec: MoeSpec) -> dict[str, int]:
    """For test_scale_ring_model.py."""
    *_, scale_slots, _, _, _ = rings(spec)
    return {
        "slots": SCALE_BATCHES,
        "stages": scale_slots.stages,
        "lanes": memory.WARP,
        "ready_arrivals": scale_slots.writers,
        "warps": HALF_WARPS,
        "free_arrivals": scale_slots.readers,
    }


def handover(spec: MoeSpec) -> dict[str, int]:
    """For test_handover_model.py: buffers of h, and epoch words that every grid leaves unused."""
    size = dict(spec.scratch_regions)
    epochs = size["epoch"] // 4
    return {"buffers": size["h"] // (4 * spec.h_words), "spare_epochs": epochs - spec.grid}
