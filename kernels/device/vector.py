"""The widest vector that a set of addresses, strides and sizes allows; host side, no compiler."""

import math

MAX_VECTOR_BYTES = 16


def vector_bytes(*multiples: int) -> int:
    """Largest power of two up to 16 that divides every argument; all arguments are in bytes.

    Pass data pointers, row strides and row sizes: a vector of that many bytes then is aligned in
    every row, and rows are whole numbers of vectors. A zero is a multiple of everything.
    """
    return math.gcd(MAX_VECTOR_BYTES, *multiples)
