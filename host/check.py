"""Declarative tensor contracts: one quick pass when all is right, one error text when not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TORCH_ALIGN = 64  # bytes, of any memory that torch allocates


def dtype_name(kind: torch.dtype | torch.layout) -> str:
    """The name without its module, such as "bfloat16"; specs and errors use it."""
    return str(kind).removeprefix("torch.")


@dataclass(frozen=True)
class TensorRule:
    """What one tensor argument must be: row-major contiguous, of these dtypes and this shape.

    A str in `shape` is a symbolic size: equal symbols agree across the arguments of one call.
    `align` is the alignment of the data pointer in bytes; an empty tensor may have any.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | str, ...]
    align: int = 16

    def describe(self, device: torch.device) -> str:
        """The rule in words, such as "[M, 2048] bfloat16, contiguous, ... on cuda:0"."""
        sizes = ", ".join(str(size) for size in self.shape)
        dtypes = " or ".join(dtype_name(dtype) for dtype in self.dtypes)
        return f"[{sizes}] {dtypes}, contiguous, {self.align}-byte aligned, on {device}"


@dataclass(frozen=True)
class Contract:
    """The rules of all tensor arguments of one function, in call order.

    `sizes` bounds symbols, ends included: {"M": (0, 8)}; an upper end of None is no bound.
    """

    rules: Sequence[TensorRule]
    sizes: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("rules: expected at least one TensorRule, got none")
        object.__setattr__(self, "_quick", _compile_quick_check(self.rules, self.sizes))

    def check(
        self,
        tensors: Sequence[torch.Tensor],
        device: torch.device | None = None,
        *,
        fake: bool = False,
    ) -> dict[str, int]:
        """Sizes of the symbols when `tensors` keep the contract on `device` (default: the first's).

        `fake`: the tensors have no data, hence no alignment. Raises TypeError for what is no
        tensor and ValueError for every other breach; the text names the argument, what was
        expected and what came.
        """
        try:
            if device is None:
                device = tensors[0].device
            values = None if fake else self._quick(tensors, device)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            values = None
        return self._check_fully(tensors, device, fake) if values is None else values

    def _check_fully(
        self, tensors: Sequence[torch.Tensor], device: torch.device | None, fake: bool
    ) -> dict[str, int]:
        """The slow, exact form of the same check, which raises."""
        if len(tensors) != len(self.rules):
            names = ", ".join(rule.name for rule in self.rules)
            raise ValueError(f"expected {len(self.rules)} tensors ({names}), got {len(tensors)}")
        for rule, tensor in zip(self.rules, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{rule.name}: expected a torch.Tensor, got {type(tensor).__name__}"
                )
        if device is None and tensors:
            device = tensors[0].device
        values: dict[str, int] = {}
        sources: dict[str, str] = {}
        for rule, tensor in zip(self.rules, tensors, strict=True):
            past = 0 if fake else _past_alignment(tensor, rule)
            fits = _is_as_ruled(rule, tensor, device) and not past
            if not (fits and self._bind(rule, tensor, values)):
                wanted = rule.describe(device) + self._describe_symbols(rule, values, sources)
                came = _describe(tensor, rule, past)
                raise ValueError(f"{rule.name}: expected {wanted}; got {came}")
            for symbol in rule.shape:
                if isinstance(symbol, str):
                    sources.setdefault(symbol, rule.name)
        return values

    def _bind(self, rule: TensorRule, tensor: torch.Tensor, values: dict[str, int]) -> bool:
        """Whether the shape fits, given the symbols so far; then its symbols join `values`."""
        bound = dict(values)
        for want, size in zip(rule.shape, tensor.shape, strict=True):
            if isinstance(want, str):
                low, high = self.sizes.get(want, (0, None))
                too_big = high is not None and size > high
                if bound.setdefault(want, size) != size or size < low or too_big:
                    return False
            elif want != size:
                return False
        values.update(bound)
        return True

    def _describe_symbols(
        self, rule: TensorRule, values: dict[str, int], sources: dict[str, str]
    ) -> str:
        """Where the symbols of a rule come from, such as ", M = 4 as in activations_in"."""
        parts = []
        for symbol in dict.fromkeys(size for size in rule.shape if isinstance(size, str)):
            if symbol in sources:
                parts.append(f", {symbol} = {values[symbol]} as in {sources[symbol]}")
            elif symbol in self.sizes:
                low, high = self.sizes[symbol]
                parts.append(
                    f", {symbol} >= {low}" if high is None else f", {low} <= {symbol} <= {high}"
                )
        return "".join(parts)


def _compile_quick_check(
    rules: Sequence[TensorRule], sizes: Mapping[str, tuple[int, int | None]]
) -> Callable[[Sequence[torch.Tensor], torch.device], dict[str, int] | None]:
    """A function that returns the symbol values, or None for "look again with the slow check".

    It is generated, one straight expression for all rules: a loop over rules and sizes costs as
    much again as reading the tensors' attributes. `mono_moe` checks only what its compiled code
    has refused; the row permutations check before every launch.
    """
    symbols = list(dict.fromkeys(s for rule in rules for s in rule.shape if isinstance(s, str)))
    variables = {symbol: f"v{i}" for i, symbol in enumerate(symbols)}
    lines = ["def quick(tensors, device):"]
    lines.append(f"    {''.join(f't{i}, ' for i in range(len(rules)))}= tensors")
    for symbol, variable in variables.items():
        i, rule = next((i, rule) for i, rule in enumerate(rules) if symbol in rule.shape)
        lines.append(f"    {variable} = t{i}.shape[{rule.shape.index(symbol)}]")
    terms = []
    for i, rule in enumerate(rules):
        dims = "".join(f"{variables[s] if isinstance(s, str) else int(s)}, " for s in rule.shape)
        terms += [
            f"t{i}.dtype in d{i}",
            f"t{i}.shape == ({dims})",
            f"t{i}.device == device",
            f"not t{i}.data_ptr() % {int(rule.align)}",
            f"t{i}.is_contiguous()",
        ]
    for symbol, (low, high) in sizes.items():
        upper = "" if high is None else f" <= {int(high)}"
        terms.append(f"{int(low)} <= {variables[symbol]}{upper}")
    lines.append(f"    if {' and '.join(terms)}:")
    lines.append(f"        return {{{', '.join(f'{s!r}: {v}' for s, v in variables.items())}}}")
    scope: dict[str, Any] = {f"d{i}": rule.dtypes for i, rule in enumerate(rules)}
    exec("\n".join(lines), scope)
    return scope["quick"]


def _is_as_ruled(rule: TensorRule, tensor: torch.Tensor, device: torch.device) -> bool:
    """Everything but sizes and alignment: layout, rank, dtype, device and contiguity."""
    return (
        tensor.layout == torch.strided
        and tensor.dim() == len(rule.shape)
        and tensor.dtype in rule.dtypes
        and tensor.device == device
        and tensor.is_contiguous()
    )


def _past_alignment(tensor: torch.Tensor, rule: TensorRule) -> int:
    """Bytes between the last aligned address and the data; 0 where there are no data."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return 0
    return tensor.data_ptr() % rule.align


def _describe(tensor: torch.Tensor, rule: TensorRule, past: int) -> str:
    """What came, in the words of `TensorRule.describe`; `past`: bytes past the alignment."""
    sizes = ", ".join(str(size) for size in tensor.shape)
    text = f"[{sizes}] {dtype_name(tensor.dtype)}"
    if tensor.layout != torch.strided:
        return f"{text}, layout {dtype_name(tensor.layout)}, on {tensor.device}"
    if not tensor.is_contiguous():
        text += f", strides {list(tensor.stride())}"
    elif past:
        text += f", address {past} bytes past {rule.align}-byte alignment"
        cure = "; its .clone() is aligned" if rule.align <= TORCH_ALIGN else ""
        return f"{text}, on {tensor.device}{cure}"
    return f"{text}, on {tensor.device}"
