"""The inputs of the tests, for the programs that run them longer or under another tool."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from argmin_cases import make_values
from dispatch_cases import Guarded, bytes_as, draw_pairs, same_bytes
from moe_cases import ROUTINGS, Weights, make_inputs, make_weights

__all__ = [
    "ROUTINGS",
    "Guarded",
    "Weights",
    "bytes_as",
    "draw_pairs",
    "make_inputs",
    "make_values",
    "make_weights",
    "same_bytes",
]
