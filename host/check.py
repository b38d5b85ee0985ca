"""Declarative tensor contracts: one quick pass when all is right, one error text when not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cute_moe.kernels.device.options import type_name

QuickCheck = Callable[[Sequence[torch.Tensor], torch.device], dict[str, int] | None]
TORCH_ALIGN = 64  # bytes, of any memory that torch allocates


def dtype_name(kind: torch.dtype | torch.layout) -> str:
    """The name without its module, such as "bfloat16"; specs and errors use it."""
    return str(kind).removeprefix("torch.")


def sized_dtypes(*itemsizes: int) -> tuple[torch.dtype, ...]:
    """All dtypes of torch whose elements have one of these sizes in bytes."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return tuple(sorted((d for d in found if d.itemsize in itemsizes), key=str))


@dataclass(frozen=True)
class TensorRule:
    """What one tensor argument must be, beside dense and on the right device.

    `dtypes`: those allowed, or the name of an earlier rule: the same as that tensor's.
    A str in `shape` is a symbolic size: equal symbols agree across the arguments of one call; None
    allows any shape. `align` is the alignment of the data pointer in bytes; an empty tensor may
    have any. `strides`: "contiguous", "rows" (the elements of a matrix' row lie side by side) or
    "any". `words`: the dtypes in the text of an error; None: their names.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] | str
    shape: tuple[int | str, ...] | None
    align: int = 16
    strides: str = "contiguous"
    words: str | None = None

    def describe(self, device: torch.device | None, dtypes: Mapping[str, torch.dtype]) -> str:
        """The rule in words, such as "[M, 2048] bfloat16, contiguous, ... on cuda:0".

        `dtypes`: those of the tensors before this one, by name.
        """
        if self.shape is None:
            parts = [""]
        else:
            parts = [f"[{', '.join(str(size) for size in self.shape)}] "]
        if isinstance(self.dtypes, str):
            parts[0] += f"{dtype_name(dtypes[self.dtypes])} as {self.dtypes}"
        else:
            parts[0] += self.words or " or ".join(dtype_name(dtype) for dtype in self.dtypes)
        if self.strides != "any":
            parts.append({"rows": "rows of adjacent elements"}.get(self.strides, self.strides))
        if self.align > 1:
            parts.append(f"{self.align}-byte aligned")
        return f"{', '.join(parts)}, on {device}"

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether rank and strides are right."""
        if self.shape is not None and tensor.dim() != len(self.shape):
            return False
        if self.strides == "rows":
            return bool(tensor.shape[1] < 2 or tensor.stride(1) == 1)
        return self.strides == "any" or tensor.is_contiguous()


@dataclass(frozen=True)
class Contract:
    """The rules of all tensor arguments of one function, in call order.

    `sizes` bounds symbols, ends included: {"M": (0, 8)}; an upper end of None is no bound.
    """

    rules: Sequence[TensorRule]
    sizes: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    _quick: QuickCheck = field(init=False, repr=False, compare=False)

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
                check_tensor(rule.name, tensor)
        if device is None and tensors:
            device = tensors[0].device
        values: dict[str, int] = {}
        sources: dict[str, str] = {}
        dtypes: dict[str, torch.dtype] = {}
        for rule, tensor in zip(self.rules, tensors, strict=True):
            past = 0 if fake else _past_alignment(tensor, rule)
            fits = _is_as_ruled(rule, tensor, device, dtypes) and not past
            if not (fits and self._bind(rule, tensor, values)):
                wanted = rule.describe(device, dtypes)
                wanted += self._describe_symbols(rule, values, sources)
                came = _describe(tensor, rule, past)
                raise ValueError(f"{rule.name}: expected {wanted}; got {came}")
            dtypes[rule.name] = tensor.dtype
            for symbol in _symbols(rule):
                sources.setdefault(symbol, rule.name)
        return values

    def _bind(self, rule: TensorRule, tensor: torch.Tensor, values: dict[str, int]) -> bool:
        """Whether the shape fits, given the symbols so far; then its symbols join `values`."""
        if rule.shape is None:
            return True
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
        for symbol in _symbols(rule):
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
) -> QuickCheck:
    """A function that returns the symbol values, or None for "look again with the slow check".

    It is generated, one straight expression for all rules: a loop over rules and sizes costs as
    much again as reading the tensors' attributes. `mono_moe` checks only what its compiled code
    has refused; the row permutations check before every launch.
    """
    symbols = list(dict.fromkeys(symbol for rule in rules for symbol in _symbols(rule)))
    variables = {symbol: f"v{i}" for i, symbol in enumerate(symbols)}
    lines = ["def quick(tensors, device):"]
    lines.append(f"    {''.join(f't{i}, ' for i in range(len(rules)))}= tensors")
    for symbol, variable in variables.items():
        i, rule = next((i, rule) for i, rule in enumerate(rules) if symbol in _symbols(rule))
        lines.append(f"    {variable} = t{i}.shape[{(rule.shape or ()).index(symbol)}]")
    terms = []
    for i, rule in enumerate(rules):
        terms += _quick_terms(i, rule, [rule.name for rule in rules[:i]], variables)
    for symbol, (low, high) in sizes.items():
        upper = "" if high is None else f" <= {int(high)}"
        terms.append(f"{int(low)} <= {variables[symbol]}{upper}")
    lines.append(f"    if {' and '.join(terms)}:")
    lines.append(f"        return {{{', '.join(f'{s!r}: {v}' for s, v in variables.items())}}}")
    scope: dict[str, Any] = {"strided": torch.strided}
    for i, rule in enumerate(rules):
        if not isinstance(rule.dtypes, str):
            scope[f"d{i}"] = frozenset(rule.dtypes)
    exec("\n".join(lines), scope)
    quick: QuickCheck = scope["quick"]
    return quick


def _quick_terms(
    i: int, rule: TensorRule, names: list[str], variables: Mapping[str, str]
) -> list[str]:
    """Conditions of the quick check on tensor t`i`; `names`: those of the rules before."""
    terms = [f"t{i}.device == device"]
    if isinstance(rule.dtypes, str):
        terms.append(f"t{i}.dtype is t{names.index(rule.dtypes)}.dtype")
    else:
        terms.append(f"t{i}.dtype in d{i}")
    if rule.shape is not None:
        dims = "".join(f"{variables[s] if isinstance(s, str) else int(s)}, " for s in rule.shape)
        terms.append(f"t{i}.shape == ({dims})")
    if rule.align > 1:
        terms.append(f"not t{i}.data_ptr() % {int(rule.align)}")
    strides = {
        "contiguous": f"t{i}.is_contiguous()",
        "rows": f"(t{i}.shape[1] < 2 or t{i}.stride(1) == 1)",
        "any": f"t{i}.layout is strided",
    }
    return [*terms, strides[rule.strides]]


def _symbols(rule: TensorRule) -> list[str]:
    """The symbolic sizes of a rule, each once."""
    return list(dict.fromkeys(size for size in rule.shape or () if isinstance(size, str)))


def _is_as_ruled(
    rule: TensorRule,
    tensor: torch.Tensor,
    device: torch.device | None,
    dtypes: Mapping[str, torch.dtype],
) -> bool:
    """Everything but sizes and alignment: layout, rank, dtype, device and strides."""
    allowed = (dtypes[rule.dtypes],) if isinstance(rule.dtypes, str) else rule.dtypes
    return (
        tensor.layout == torch.strided
        and tensor.dtype in allowed
        and tensor.device == device
        and rule.has(tensor)
    )


def _past_alignment(tensor: torch.Tensor, rule: TensorRule) -> int:
    """Bytes between the last aligned address and the data; 0 where there are no data."""
    if rule.align == 1 or tensor.layout != torch.strided or tensor.numel() == 0:
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


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a tensor, ValueError unless it is dense.

    For what must be known before a contract is checked; it needs no addresses.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(value)}")
    if value.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {value.layout}")


def check_apart(out: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError where the memory that `out` spans overlaps that of an input, by name."""
    start, end = _span(out)
    for name, tensor in inputs.items():
        first, last = _span(tensor)
        if first < end and start < last:
            raise ValueError(f"out: expected memory of its own, got an overlap with {name}")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and behind its last one."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()
