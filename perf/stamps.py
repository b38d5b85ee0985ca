"""The timeline inside the MoE kernel: a variant that stamps its events with the global timer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cute_moe.host.compile import compile_cached
from cute_moe.host.scratch import Region, ScratchLayout
from cute_moe.kernels.moe.spec import EVENTS, MoeSpec
from cute_moe.timing import capture


def record(
    calls: Sequence[Sequence[torch.Tensor]], spec: MoeSpec, replays: int = 3
) -> tuple[tuple[str, ...], torch.Tensor]:
    """Run `calls` in one CUDA graph and return (event names, stamps of the last replay).

    calls: the six inputs of `mono_moe` and an output, each; options are those of `spec`.
    stamps: int64 [calls, grid, events] on the CPU, ns of the global timer; 0 = did not happen.
    The stores of the stamps are part of what is measured.
    """
    from cute_moe.kernels.moe.kernel import build

    spec = replace(spec, trace=EVENTS)
    function = compile_cached(spec, lambda options: build(spec, options))
    layout = ScratchLayout([Region(n, size, zeroed=True) for n, size in spec.scratch_regions])
    pads = [layout.allocate(calls[0][0].device) for _ in calls]
    used = sum(size for _, size in spec.scratch_regions)
    launches = [
        lambda call=call, pad=pad[:used]: function(*call, pad)
        for call, pad in zip(calls, pads, strict=True)
    ]
    graph = capture(launches)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    stamps = torch.stack([layout.view(pad, "trace").view(torch.int64) for pad in pads]).cpu()
    return EVENTS, stamps.view(len(calls), spec.grid, len(EVENTS))
