"""A few launches at M = 1 and M = 8, checked: the program to run under compute-sanitizer."""

from itertools import product

import torch
from moe_cases import make_inputs, make_weights

import cute_moe
from cute_moe import reference
from cute_moe.reference import relative_error


def main() -> None:
    device = torch.device("cuda", 0)
    weights = make_weights(device).quantised
    pad = cute_moe.alloc_scratchpad(device)
    for tokens, activations in product((1, 8), ("fp8", "bf16")):
        x, logits = make_inputs(tokens, "random", device)
        for _ in range(3):
            got = cute_moe.mono_moe(x, logits, *weights, 8, scratchpad=pad, activations=activations)
        emulate = reference.moe_block_fp8 if activations == "fp8" else reference.moe_fp32
        error = relative_error(got, emulate(x, logits, *weights, 8, "softmax", True))
        print(f"M = {tokens}, {activations}: relative error {error:.4f}")


if __name__ == "__main__":
    main()
