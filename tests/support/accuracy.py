"""Errors over many random cases, on a GPU: python accuracy.py (with tests/support on the path)."""

import statistics

import torch
from moe_cases import ROUTINGS, make_inputs, make_weights

import cute_moe
from cute_moe import reference

DRAWS, TOKENS, TOP_KS, BOUND = 25, (1, 2, 5, 8), (1, 2, 8), 1.5e-2


def main() -> None:
    device = torch.device("cuda", 0)
    weights = make_weights(device).quantised
    pad = cute_moe.alloc_scratchpad(device)
    torch.manual_seed(1)
    for top_k in TOP_KS:
        for routing in ROUTINGS:
            errors = []
            for _ in range(DRAWS):
                for tokens in TOKENS:
                    x, logits = make_inputs(tokens, routing, device)
                    got = cute_moe.mono_moe(x, logits, *weights, top_k, scratchpad=pad)
                    want = reference.moe_block_fp8(x, logits, *weights, top_k, "softmax", True)
                    errors.append(reference.relative_error(got, want))
            over = sum(error > BOUND for error in errors)
            print(
                f"top_k {top_k}, {routing}: mean {statistics.mean(errors):.4f}, worst "
                f"{max(errors):.4f}, over {BOUND}: {over} of {len(errors)}"
            )


if __name__ == "__main__":
    main()
