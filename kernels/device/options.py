"""Checks of plain values, whose errors name the argument; standard library only, for specs."""

from collections.abc import Sequence
from typing import Any


def type_name(value: object) -> str:
    """The name of a value's type, with the module unless it is built in: "int", "numpy.bool"."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def check_int(name: str, value: Any, low: int, high: int, kinds: tuple[Any, ...] = (int,)) -> None:
    """Raise TypeError unless `value` is of `kinds` (a bool is no int), ValueError unless low..high.

    More kinds than int are for values that stand for one, as in traced code.
    """
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name}: expected an int, got {type_name(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low}..{high}, got {value}")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type_name(value)}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        names = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}: expected {names}, got {value!r}")
