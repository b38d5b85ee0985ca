"""The arguments of a call of `mono_moe` by name, for what stands in for it in tests."""

import inspect
from typing import Any

from cute_moe import moe, reference

_SIGNATURE = inspect.signature(moe.mono_moe)
TENSORS = 6  # the first arguments
ROUTING = 3  # those behind them: top_k, scoring_func, renormalize


def named(*arguments: Any, **keywords: Any) -> dict[str, Any]:
    """The arguments as `mono_moe` would get them, defaults included; TypeError if it would not."""
    given = _SIGNATURE.bind(*arguments, **keywords)
    given.apply_defaults()
    return dict(given.arguments)


def run_reference(*arguments: Any, **keywords: Any) -> Any:
    """`mono_moe` by the reference, for tensors of any shape."""
    given = named(*arguments, **keywords)
    result = reference.moe_block_fp8(*list(given.values())[: TENSORS + ROUTING])
    return result if given["out"] is None else given["out"].copy_(result)
