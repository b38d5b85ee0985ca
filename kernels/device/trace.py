"""Time stamps of named events in a kernel, for timelines; nothing is compiled unless asked for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int64


@cute.jit
def stamp(trace: cute.Pointer, event: cutlass.Constexpr, spec: cutlass.Constexpr):
    """Store the global timer (ns) as `event` of this CTA; called by a converged warp.

    trace: int64 [grid, len(spec.trace)] in global memory. Does nothing unless `event` is in
    `spec.trace`, the names of the events.
    """
    if cutlass.const_expr(event in spec.trace):
        cta, _, _ = cute.arch.block_idx()
        index = cutlass.const_expr(spec.trace.index(event))
        with cute.arch.elect_one():
            where = trace + cta * len(spec.trace) + index
            cute.make_tensor(where, cute.make_layout(1))[0] = Int64(cute.arch.globaltimer())
