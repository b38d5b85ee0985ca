"""Sizes that host and specs reckon with; standard library only."""

import math

SMEM_LIMIT = 227 * 1024  # bytes of shared memory that one CTA can have on sm_90
MAX_VECTOR_BYTES = 16


def ceil_div(value: int, by: int) -> int:
    """The least integer that is at least value / by, for `by` > 0."""
    return -(-value // by)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def power_of_two(value: int) -> int:
    """The least power of two that is at least `value`, for `value` > 0."""
    return 1 << (value - 1).bit_length()


def vector_bytes(*multiples: int) -> int:
    """Largest power of two up to 16 that divides every argument; all arguments are in bytes.

    Pass data pointers, row strides and row sizes: a vector of that many bytes then is aligned in
    every row, and rows are whole numbers of vectors. A zero is a multiple of everything.
    """
    return math.gcd(MAX_VECTOR_BYTES, *multiples)
