"""The torch reference of one block-FP8 MoE layer: used by the tests, the demo and the benchmarks.

Symbols: M tokens, E experts, K hidden features, N intermediate features (K and N are multiples
of 128), k = top_k. Expert weights are e4m3 with one scale per 128 x 128 block; `weight * scale`
is the value meant. Every function runs on the device of its arguments.

`moe_block_fp8` is what the kernel computes, step by step. `moe_fp32` is what the layer means:
dequantised weights and activations that are never rounded. Both give a token the same bits in every
batch, whatever torch's autocast and matmul precision are set to.
"""

from collections.abc import Callable

import torch

BLOCK = 128  # features that share one scale
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
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]

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


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises per 128 features: x [.., D] -> e4m3 [.., D], scale fp32 [.., D/128]."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = _scale_of(blocks.abs().amax(dim=-1))
    return _round_e4m3(blocks / scale.unsqueeze(-1)).flatten(-2), scale


def quantize_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises per 128 x 128: w [.., R, C] -> e4m3 [.., R, C], scale fp32 [.., R/128, C/128]."""
    blocks = w.float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scale = _scale_of(blocks.abs().amax(dim=(-3, -1), keepdim=True))
    q = _round_e4m3(blocks / scale).flatten(-2).flatten(-3, -2)
    return q, scale.squeeze((-3, -1))


def dequantize_blocks(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiplies blocks by scales: q [.., R, C], scale [.., R/128, C/128] -> fp32 [.., R, C]."""
    blocks = q.float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
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
    _check_experts(x, w_up, w_down)
    ids, weights = route(router_logits, top_k, scoring_func, renormalize)

    def mlp(expert: int, tokens: torch.Tensor) -> torch.Tensor:
        up = dequantize_blocks(w_up[expert], s_up[expert])
        down = dequantize_blocks(w_down[expert], s_down[expert])
        return _mlp_fp32(tokens, up, down)

    return _combine(x, ids, weights, mlp)


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

    return _combine(x, ids, weights, mlp)


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

    w_up e4m3 [E, 2N, K] (gate rows, then up rows) with s_up [E, 2N/128, K/128], w_down e4m3
    [E, K, N] with s_down [E, K/128, N/128]; scales fp32 or bf16.
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
) -> torch.Tensor:
    """`moe_block_fp8` for a given routing: ids [M, k], weights [M, k] fp32."""
    _check_experts(x, w_up, w_down)

    def mlp(expert: int, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = _matmul_block_fp8(tokens, w_up[expert], s_up[expert]).chunk(2, dim=1)
        h = _by_row(_silu, gate) * up
        return _matmul_block_fp8(h.to(torch.bfloat16), w_down[expert], s_down[expert])

    return _combine(x, ids, weights, mlp).to(torch.bfloat16)


def _combine(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, mlp: ExpertMlp
) -> torch.Tensor:
    """Runs `mlp(expert, rows)` once per active expert and sums each token's slots in order."""
    num_tokens, top_k = ids.shape
    slots = torch.empty(num_tokens, top_k, x.shape[1], dtype=torch.float32, device=x.device)
    pairs_of: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.flatten().tolist()):
        pairs_of.setdefault(expert, []).append(pair)
    for expert, pairs in pairs_of.items():
        index = torch.tensor(pairs, device=x.device)
        slots.flatten(0, 1)[index] = mlp(expert, x[index // top_k])

    out = torch.zeros(num_tokens, x.shape[1], dtype=torch.float32, device=x.device)
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


def _matmul_block_fp8(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """x [m, C] times w [R, C] e4m3 with s [R/128, C/128], x quantised first: [m, R] fp32.

    Each 128-wide partial dot product is computed in fp64, where sums of e4m3 products are exact,
    and rounded to fp32 once: the result depends neither on the order of the sum nor on m.
    """
    q, s_x = quantize_activations(x)
    q_blocks = q.double().unflatten(-1, (-1, BLOCK)).transpose(0, 1)  # (C/128, m, 128)
    w_blocks = w.double().unflatten(-1, (-1, BLOCK)).permute(1, 2, 0)  # (C/128, 128, R)
    partial = torch.bmm(q_blocks, w_blocks).float()  # (C/128, m, R)
    s_w = s.float().repeat_interleave(BLOCK, dim=0)  # (R, C/128)

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
