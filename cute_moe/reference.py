"""The torch reference of one block-FP8 MoE layer: used by the tests, the demo and the benchmarks.

Symbols: M tokens, E experts, K hidden features, N intermediate features, k = top_k. Expert weights
are e4m3 with one scale (fp32, bf16 or e8m0) per block; `weight * scale` is the value meant. A block
is b features of N by c of K: b is 128, 64 or 32 and divides N, c is 128 or b and divides K. x is
quantised per 128 features, h per b. Every function runs on the device of its arguments.

`moe_block_fp8` is what the kernel computes, step by step. `moe_fp32` is what the layer means:
dequantised weights and activations that are never rounded. Both give a token the same bits in every
batch, whatever torch's autocast and matmul precision are set to.
"""

from collections.abc import Callable

import torch

BLOCK = 128  # features that share one scale, unless blocks are smaller
BLOCKS = (128, 64, 32)
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10  # keeps 1/scale finite for all-zero and denormal blocks
SMALLEST_SIGMOID = 2.0**-126  # a smaller one is no normal fp32 number and counts as zero
SCORING_FUNCS = ("softmax", "sigmoid")

ExpertMlp = Callable[[int, torch.Tensor], torch.Tensor]


def route(
    router_logits: torch.Tensor, top_k: int, scoring_func: str = "softmax", renormalize: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts of each token: logits [M, E] -> ids [M, k] int64, weights [M, k] fp32.

    Experts are ranked by logit, a NaN counting as -inf; equal logits go to the lower id. For the
    weights, infinities count as the largest finite fp32, and a sigmoid below 2^-126 (of a logit
    below -87.3) as zero. Raises ValueError on a bad `top_k` or
    `scoring_func`.
    """
    if router_logits.dim() != 2:
        raise ValueError(f"router_logits: expected [M, E], got {list(router_logits.shape)}")
    num_experts = router_logits.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: expected 1..{num_experts}, got {top_k}")
    if scoring_func not in SCORING_FUNCS:
        raise ValueError(f"scoring_func: expected one of {SCORING_FUNCS}, got {scoring_func!r}")

    logits = router_logits.float()
    logits = torch.where(logits.isnan(), -torch.inf, logits) + 0.0  # -0.0 becomes +0.0
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()

    finite = torch.finfo(torch.float32)
    logits = logits.clamp(finite.min, finite.max)
    if scoring_func == "softmax":
        scores = _by_row(torch.exp, logits - logits.amax(dim=1, keepdim=True))
        weights = scores.gather(1, ids)
        total = (weights if renormalize else scores).sum(dim=1, keepdim=True)
        return ids, weights / total
    weights = _by_row(torch.sigmoid, logits).gather(1, ids)
    weights = torch.where(weights < SMALLEST_SIGMOID, 0.0, weights)
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(SMALLEST_SIGMOID)
    return ids, weights


def local_ids(
    ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None = None
) -> torch.Tensor:
    """The expert here of each given id, int64, or -1 where there is none.

    ids of any shape, int32 or int64. With `expert_map` [G] they are looked up there, else they are
    0 .. num_experts - 1 themselves; what lies outside before or after has no expert.
    """
    found = ids.long()
    if expert_map is not None:
        known = (found >= 0) & (found < len(expert_map))
        found = torch.where(known, expert_map.long()[torch.where(known, found, 0)], -1)
    return torch.where((found >= 0) & (found < num_experts), found, -1)


def scale_blocks(
    w_up: torch.Tensor,
    s_up: torch.Tensor,
    w_down: torch.Tensor,
    s_down: torch.Tensor,
    names: tuple[str, str] = ("s_up", "s_down"),
) -> tuple[int, int]:
    """(b, c): the features of N and of K that share a weight scale, from the scales' shapes.

    Raises ValueError, with the scales' `names`, where these fit no such block.
    """
    experts, hidden, inner = w_down.shape
    for b in BLOCKS:
        for c in (BLOCK, b):
            if inner % b or hidden % c or s_down.shape != (experts, hidden // c, inner // b):
                continue
            wanted = (experts, w_up.shape[1] // b, hidden // c)
            if s_up.shape == wanted:
                return b, c
            raise ValueError(
                f"{names[0]}: expected {list(wanted)}, blocks of {b} x {c} as in {names[1]}; "
                f"got {list(s_up.shape)}"
            )
    raise ValueError(
        f"{names[1]}: expected [{experts}, {hidden}/c, {inner}/b], b = 128, 64 or 32, c = 128 or b;"
        f" got {list(s_down.shape)}"
    )


def quantize_activations(x: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises per `block` features: x [.., D] -> e4m3 [.., D], scale fp32 [.., D/block]."""
    blocks = x.float().unflatten(-1, (-1, block))
    scale = _scale_of(blocks.abs().amax(dim=-1))
    return _round_e4m3(blocks / scale.unsqueeze(-1)).flatten(-2), scale


def quantize_blocks(
    w: torch.Tensor, rows: int = BLOCK, columns: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises per rows x columns: w [.., R, C] -> e4m3 [.., R, C], scale fp32 of each block."""
    blocks = w.float().unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    scale = _scale_of(blocks.abs().amax(dim=(-3, -1), keepdim=True))
    q = _round_e4m3(blocks / scale).flatten(-2).flatten(-3, -2)
    return q, scale.squeeze((-3, -1))


def dequantize_blocks(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiplies blocks by scales: q [.., R, C], scale [.., R/rows, C/columns] -> fp32 [.., R, C].

    The shapes say how large the blocks are.
    """
    blocks = q.float().unflatten(-1, (scale.shape[-1], -1)).unflatten(-3, (scale.shape[-2], -1))
    return (blocks * scale.float()[..., :, None, :, None]).flatten(-2).flatten(-3, -2)


def moe_fp32(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_up: torch.Tensor,
    s_up: torch.Tensor,
    w_down: torch.Tensor,
    s_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
) -> torch.Tensor:
    """The layer from dequantised fp32 weights; arguments as `moe_block_fp8`, out [M, K] fp32.

    Each expert's products are computed in fp64 and rounded to fp32 twice: as h and as output.
    """
    ids, weights = route(router_logits, top_k, scoring_func, renormalize)
    return moe_fp32_routed(x, ids, weights, w_up, s_up, w_down, s_down)


def moe_fp32_routed(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w_up: torch.Tensor,
    s_up: torch.Tensor,
    w_down: torch.Tensor,
    s_down: torch.Tensor,
    output_scale: float = 1.0,
) -> torch.Tensor:
    """`moe_fp32` for a given routing; arguments as `moe_block_fp8_routed`."""
    _check_experts(x, w_up, w_down)
    scale_blocks(w_up, s_up, w_down, s_down)

    def mlp(expert: int, tokens: torch.Tensor) -> torch.Tensor:
        up = dequantize_blocks(w_up[expert], s_up[expert])
        down = dequantize_blocks(w_down[expert], s_down[expert])
        return _mlp_fp32(tokens, up, down)

    return _combine(x, local_ids(ids, len(w_up)), weights, mlp) * output_scale


def moe_fp32_dense(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:
    """The layer in fp32 from plain weights and a given routing: out [M, K] fp32.

    x [M, K], ids [M, k], weights [M, k], w_up [E, 2N, K] (gate rows, then up rows),
    w_down [E, K, N]; any float dtype.
    """
    _check_experts(x, w_up, w_down)

    def mlp(expert: int, tokens: torch.Tensor) -> torch.Tensor:
        return _mlp_fp32(tokens, w_up[expert], w_down[expert])

    return _combine(x, local_ids(ids, len(w_up)), weights, mlp)


def moe_block_fp8(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_up: torch.Tensor,
    s_up: torch.Tensor,
    w_down: torch.Tensor,
    s_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
) -> torch.Tensor:
    """The layer in block-FP8 arithmetic: x [M, K] bf16, logits [M, E] -> out [M, K] bf16.

    w_up e4m3 [E, 2N, K] (gate rows, then up rows) with s_up [E, 2N/b, K/c], w_down e4m3 [E, K, N]
    with s_down [E, K/c, N/b].
    """
    ids, weights = route(router_logits, top_k, scoring_func, renormalize)
    return moe_block_fp8_routed(x, ids, weights, w_up, s_up, w_down, s_down)


def moe_block_fp8_routed(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w_up: torch.Tensor,
    s_up: torch.Tensor,
    w_down: torch.Tensor,
    s_down: torch.Tensor,
    output_scale: float = 1.0,
) -> torch.Tensor:
    """`moe_block_fp8` for a given routing: ids [M, k] int32 or int64, weights [M, k] fp32 or bf16.

    An id may come several times in a row; one outside 0 .. E - 1 is skipped, whatever its weight.
    `output_scale` multiplies the fp32 sum before it is rounded.
    """
    _check_experts(x, w_up, w_down)
    h_block, _ = scale_blocks(w_up, s_up, w_down, s_down)

    def mlp(expert: int, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = _matmul_block_fp8(tokens, w_up[expert], s_up[expert], BLOCK).chunk(2, dim=1)
        h = (_by_row(_silu, gate) * up).to(torch.bfloat16)
        return _matmul_block_fp8(h, w_down[expert], s_down[expert], h_block)

    total = _combine(x, local_ids(ids, len(w_up)), weights, mlp)
    return (total * output_scale).to(torch.bfloat16)


def _combine(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, mlp: ExpertMlp
) -> torch.Tensor:
    """Runs `mlp(expert, rows)` once per active expert and sums each token's slots in order.

    Negative ids add nothing.
    """
    num_tokens, top_k = ids.shape
    slots = torch.zeros(num_tokens, top_k, x.shape[1], dtype=torch.float32, device=x.device)
    pairs_of: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            pairs_of.setdefault(expert, []).append(pair)
    for expert, pairs in pairs_of.items():
        index = torch.tensor(pairs, device=x.device)
        slots.flatten(0, 1)[index] = mlp(expert, x[index // top_k])

    out = torch.zeros(num_tokens, x.shape[1], dtype=torch.float32, device=x.device)
    weights = torch.where(ids >= 0, weights.float(), 0.0)  # a skipped one may be NaN
    for slot in range(top_k):
        out += weights[:, slot, None] * slots[:, slot]
    return out


def _mlp_fp32(tokens: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """fp64 products, which autocast and reduced matmul precision leave alone: fp32 [m, K]."""
    up, down = up.double(), down.double()

    def mlp(token: torch.Tensor) -> torch.Tensor:
        gate, value = (up @ token).float().chunk(2)
        return (down @ (_silu(gate) * value).double()).float()

    return _by_row(mlp, tokens.double())


def _by_row(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """`function` of each row alone: a batch would change the order of a sum, and whether torch's
    vector code or its scalar code, which differ in last bits, computes an element."""
    results = [function(row.clone()) for row in rows]
    return torch.stack(results) if results else torch.zeros_like(rows)


def _matmul_block_fp8(
    x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, x_block: int
) -> torch.Tensor:
    """x [m, C] times w [R, C] e4m3 with scales s, x quantised per `x_block` first: [m, R] fp32.

    The blocks of w are no wider than those of x. The partial dot product of each block is computed
    in fp64, where sums of e4m3 products are exact, and rounded to fp32 once: the result depends
    neither on the order of the sum nor on m.
    """
    width = w.shape[1] // s.shape[1]
    q, s_x = quantize_activations(x, x_block)
    q_blocks = q.double().unflatten(-1, (-1, width)).transpose(0, 1)  # (C/width, m, width)
    w_blocks = w.double().unflatten(-1, (-1, width)).permute(1, 2, 0)  # (C/width, width, R)
    partial = torch.bmm(q_blocks, w_blocks).float()  # (C/width, m, R)
    s_x = s_x.repeat_interleave(x_block // width, dim=1)  # (m, C/width)
    s_w = s.float().repeat_interleave(w.shape[0] // s.shape[0], dim=0)  # (R, C/width)

    acc = torch.zeros(partial.shape[1:], dtype=torch.float32, device=x.device)
    for block in range(partial.shape[0]):
        acc += partial[block] * (s_x[:, block, None] * s_w[None, :, block])
    return acc


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1.0 + torch.exp(-x))


def _scale_of(amax: torch.Tensor) -> torch.Tensor:
    # Dividing by a Python number would multiply by its reciprocal on a GPU: one ulp off, which
    # flips e4m3 ties.
    return amax.clamp_min(AMAX_FLOOR) / torch.full_like(amax, E4M3_MAX)


def _round_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)  # nearest even; the clamp saturates


def _check_experts(x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> None:
    """Raises ValueError unless x [M, K], w_up [E, 2N, K] and w_down [E, K, N] fit together."""
    if x.dim() != 2 or w_up.dim() != 3 or w_down.dim() != 3:
        raise ValueError(
            "expected x [M, K], w_up [E, 2N, K], w_down [E, K, N]; got "
            f"{list(x.shape)}, {list(w_up.shape)}, {list(w_down.shape)}"
        )
    hidden, (experts, rows_up, _) = x.shape[1], w_up.shape
    if w_up.shape[2] != hidden or tuple(w_down.shape) != (experts, hidden, rows_up // 2):
        raise ValueError(
            f"w_up, w_down: expected [E, 2N, {hidden}] and [E, {hidden}, N]; got "
            f"{list(w_up.shape)} and {list(w_down.shape)}"
        )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `want`; nan or inf when `got` is not finite.

    Where `want` is all zeros or empty: 0 when `got` is too, else huge.
    """
    want = want.double()
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-300))
