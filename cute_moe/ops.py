"""Registration of this package's operators with torch.library, all in the namespace cute_moe."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

NAMESPACE = "cute_moe"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define the operator of `schema`, such as "copy_rows(Tensor x, Tensor(a!) out) -> ()".

    `run` executes it on CPU and CUDA tensors; `fake` does the same for tensors without data: it
    makes the results' shapes and dtypes and raises on what it can see. Returns the callable, which
    records no gradients; to autograd, what `!` marks has been changed in place.
    `run` must not return an argument or a view of one, and must write only what `!` marks.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    aliases = [argument.alias_info for argument in operator._schema.arguments]
    names = [argument.name for argument in operator._schema.arguments]
    written = [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]

    @torch.no_grad()
    def call(*arguments: Any) -> Any:
        if written and not torch.is_inference_mode_enabled():
            for i in written:
                _check_counted(names[i], arguments[i])
        result = run(*arguments)
        if written:  # Nothing else counts a kernel's write as one.
            increment_version([arguments[i] for i in written])
        return result

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, call, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return operator


def _check_counted(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor whose changes autograd cannot count where it would."""
    if tensor.is_inference():
        raise ValueError(
            f"{name}: expected a tensor from outside of torch.inference_mode(), as the call is; "
            "got an inference tensor"
        )
