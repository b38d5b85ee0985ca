"""The one debugging switch: the environment variable CUTE_MOE_DEBUG, read once per process."""

import functools
import os
import sys

VARIABLE = "CUTE_MOE_DEBUG"
MAX_LEVEL = 2


@functools.lru_cache(maxsize=1)
def debug_level() -> int:
    """Level of this process: 0 off, 1 log compiles, 2 also line info in the code.

    The level is part of every compile key. Raises ValueError when the variable is not an integer
    from 0 to 2.
    """
    text = os.environ.get(VARIABLE, "").strip() or "0"
    if not text.isdecimal() or int(text) > MAX_LEVEL:
        raise ValueError(f"{VARIABLE}: expected an integer from 0 to {MAX_LEVEL}, got {text!r}")
    return int(text)


def log(message: str) -> None:
    """Print one line to stderr at level 1 and above."""
    if debug_level() >= 1:
        print(f"cute_moe: {message}", file=sys.stderr, flush=True)
