"""Compiling any kernel of this package from its spec."""

from typing import Any

from cute_moe.kernels.dispatch import combine, kernel, permute
from cute_moe.kernels.dispatch.spec import CombineSpec, CountSpec, DispatchSpec, SortSpec

_BUILDERS = {
    DispatchSpec: kernel.build,
    CountSpec: permute.build_count,
    SortSpec: permute.build_sort,
    CombineSpec: combine.build,
}


def build(spec: Any, options: str) -> Any:
    """What `cute.compile` returns; the arguments are those of the spec's own builder."""
    return _BUILDERS[type(spec)](spec, options)
