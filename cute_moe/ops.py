"""Registration of this package's operators with torch.library, all in the namespace cute_moe."""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "cute_moe"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define the operator of `schema`, such as "copy_rows(Tensor x, Tensor(a!) out) -> ()".

    `run` executes it on CPU and CUDA tensors; `fake` does the same for tensors without data: it
    makes the results' shapes and dtypes and raises on what it can see. Returns the callable, which
    records no gradients.
    `run` must not return an argument or a view of one, and must write only what `!` marks.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, torch.no_grad()(run), key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
