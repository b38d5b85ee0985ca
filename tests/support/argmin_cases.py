"""Inputs that are hard for argmin: shapes of every kind, and values with ties, NaN and zeros."""

from __future__ import annotations

import math
import random

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
# Both signs and several payloads of NaN, both zeros, numbers that are subnormal in some dtype.
SPECIAL = (
    *(0x7FC00000, 0xFFC00000 - (1 << 32), 0x7FFFE000, 0xFFFFFFFF - (1 << 32)),
    *(0x7F800000, 0xFF800000 - (1 << 32), 0, -(1 << 31)),
    *(0x3F800000, 0xBF800000 - (1 << 32), 0x000116C2, 0x000116C2 - (1 << 31), 0x33800000),
)
NAN, INFINITY, REST = slice(0, 4), slice(4, 6), slice(6, None)
KINDS = ("normal", "ties", "special", "no nan", "one value", "zeros", "rare nan", "infinities")

# Shapes and dimensions: with the kinds of kernel that they use and whether CTAs share reductions.
GEOMETRIES = {
    ((4, 102400), 1): ("rows", True),
    ((3, 70001), 1): ("rows", True),
    ((20000, 67), 1): ("rows", False),
    ((3, 50), None): ("rows", False),
    ((3, 999, 405), 1): ("columns", False),
    ((30000, 129), 0): ("columns", True),
    ((90000, 3), 0): ("columns", True),
    ((5, 333, 1024), 1): ("columns", False),
    ((500, 6, 10), 1): ("columns", False),
    ((5000, 4095), 0): ("stream", True),
    ((300, 20, 4095), 1): ("stream", False),
    ((20, 300, 9001), 1): ("stream", True),
    ((2, 6000, 1025), 1): ("stream", True),
}


def make_values(shape, dtype: torch.dtype, kind: str, device: str = "cpu") -> torch.Tensor:
    """A contiguous tensor of that shape, drawn from torch's global random state."""
    if dtype is torch.int32:
        return _make_integers(shape, kind, device)
    table = torch.tensor(SPECIAL, dtype=torch.int64).to(torch.int32).view(torch.float32)
    nan, infinity, rest = (table[part].to(device) for part in (NAN, INFINITY, REST))

    def pick(values: torch.Tensor) -> torch.Tensor:
        return values[torch.randint(len(values), shape, device=device)]

    if kind == "normal":
        x = torch.randn(shape, device=device)
    elif kind == "ties":
        x = torch.randn(shape, device=device).mul_(2).round_()
    elif kind == "special":
        x = pick(table.to(device))
    elif kind == "no nan":
        x = pick(torch.cat([infinity, rest]))
    elif kind == "one value":
        x = torch.full(shape, float(random.choice([*infinity, *rest])), device=device)
    elif kind == "zeros":
        x = pick(rest[:2])
    elif kind == "rare nan":
        chance = 2 / max(math.prod(shape), 1)
        rare = torch.rand(shape, device=device) < max(chance, 1e-3)
        x = torch.where(rare, pick(nan), torch.randn(shape, device=device))
    elif kind == "infinities":
        mostly = torch.rand(shape, device=device) < 0.99
        x = torch.where(mostly, float(random.choice(infinity)), pick(infinity))
    else:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    return x.to(dtype)


def _make_integers(shape, kind: str, device: str) -> torch.Tensor:
    """int32: the whole range, few values, or the extremes."""
    low, high = -(1 << 31), (1 << 31) - 1
    if kind == "one value":
        return torch.full(shape, random.choice([low, 0, high]), dtype=torch.int32, device=device)
    x = torch.randint(low, high + 1, shape, dtype=torch.int64, device=device).to(torch.int32)
    if kind in ("ties", "zeros"):
        return x >> 29
    if kind == "infinities":
        return torch.where(x % 64 == 0, x, random.choice([low, high])).to(torch.int32)
    return x


def random_shape(limit: int) -> tuple[int, ...]:
    """1 to 4 sizes, small, odd or round, with at most `limit` elements."""
    while True:
        rank = random.randint(1, 4)
        shape = tuple(_random_size() for _ in range(rank))
        if math.prod(shape) <= limit:
            return shape


def stream_shape(itemsize: int) -> tuple[int, int, int]:
    """[outer, reduce, inner] of 16 to 64 MB with rows of at least 2 KB, mostly of odd sizes."""
    outer, inner = random.choice([1, 2, 3, 17]), random.randint(2048 // itemsize, 20_000)
    nbytes = 2 ** random.uniform(24, 26)
    return outer, math.ceil(nbytes / (outer * inner * itemsize)), inner


def _random_size() -> int:
    kind = random.random()
    if kind < 0.15:
        return random.choice([1, 1, 2, 3])
    if kind < 0.4:
        return random.randint(1, 40)
    if kind < 0.6:
        return random.choice([4, 8, 16, 64, 128, 256, 512, 1024, 4096])
    return round(2 ** random.uniform(1, 17)) + random.randint(-1, 1)
