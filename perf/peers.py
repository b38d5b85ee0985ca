"""Other implementations of the layer, each an adapter that says why it cannot take part.

An adapter takes the weight copies in our call order and returns a Peer, whose `call` computes what
`mono_moe` does. Every timed call is the whole layer, routing and quantisation included; weights are
brought into the peer's own layout beforehand.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import protocol as p
import torch
from build_flashinfer import LIBRARY
from contest import Options, skip

from cute_moe import reference
from cute_moe.moe import interleave_for_tma_wgmma_up
from cute_moe.shapes import LayerShape

FLASHINFER_SO = "CUTE_MOE_FLASHINFER_SO"
FLASHINFER_SOFTMAX = 1
TRITON_PEERS = p.ROOT / ".peers"  # the pipelines of vLLM and SGLang, set up beforehand
Weights = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Peer:
    """`call(x, logits, w_up, s_up, w_down, s_down, out)` on its own weight copies.

    It returns its result: `out`, or a tensor of its own where that saves the peer a copy.
    `max_error` bounds the relative Frobenius error against the block-FP8 reference, or against the
    fp32 one if activations are `unquantised`; it is wider than ours where the peer's own arithmetic
    differs from the reference's. A `baseline` is so slow that few rows are enough.
    """

    call: Callable[..., object]
    copies: Sequence[Weights]
    max_error: float
    unquantised: bool = False
    baseline: bool = False


def flashinfer(copies: Sequence[Weights], shape: LayerShape) -> Peer:
    """FlashInfer's `mono_moe`: the installed package, or the library of perf/build_flashinfer.py.

    It quantises h per 64 features instead of 128 and adds with atomics, so its results differ by
    about 0.025 from the reference, and a little from run to run. Raises ValueError for a shape that
    it does not take.
    """
    if shape != p.SHAPE:
        raise ValueError(f"shape: FlashInfer takes {p.SHAPE} only")
    topk, scratchpad_bytes = _flashinfer_functions()
    scratchpad = torch.zeros(scratchpad_bytes, dtype=torch.uint8, device=copies[0][0].device)
    own = [(interleave_for_tma_wgmma_up(up), *others) for up, *others in copies]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        topk(*tensors, scratchpad, p.TOP_K, FLASHINFER_SOFTMAX, True)
        return tensors[-1]

    return Peer(call, own, max_error=0.05)


def library() -> Path | None:
    """FlashInfer's library: the one that CUTE_MOE_FLASHINFER_SO names, else what was built here."""
    named = os.environ.get(FLASHINFER_SO)
    return Path(named) if named else LIBRARY if LIBRARY.is_file() else None


def _flashinfer_functions() -> tuple[Callable[..., object], int]:
    """FlashInfer's kernel as a function, below its checks in Python, and its scratchpad's bytes."""
    path = library()
    if path:
        import tvm_ffi

        if not path.is_file():
            raise FileNotFoundError(f"{FLASHINFER_SO}={path}: no such file")
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # it calls the driver without linking
        module = tvm_ffi.load_module(str(path))
    else:
        from flashinfer.jit.monomoe import load_monomoe_module

        module = load_monomoe_module()
    return module.monomoe_topk, int(module.monomoe_scratchpad_size())


def versions() -> dict[str, str]:
    """Releases of the peers that are installed, and what the library of FlashInfer was built from.

    Read from the text file that perf/build_flashinfer.py writes beside the library.
    """
    found = {}
    for name in ("flashinfer-python", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    path = library()
    if path:
        note = path.with_suffix(".txt")
        text = note.read_text(encoding="utf-8").strip() if note.is_file() else "unknown build"
        found[FLASHINFER_SO] = text
    releases = TRITON_PEERS / "releases.txt"
    if releases.is_file():
        found["triton_peers"] = releases.read_text(encoding="utf-8").strip()
    return found


def vllm_triton(copies: Sequence[Weights], shape: LayerShape) -> Peer:
    """vLLM's Triton path with its tuned config: top-k, then align, quantise, two GEMMs, sum."""
    return _triton("vllm_moe", copies, shape)


def sglang_triton(copies: Sequence[Weights], shape: LayerShape) -> Peer:
    """SGLang's Triton path with its tuned config, with the same steps as vLLM's."""
    return _triton("sglang_moe", copies, shape)


def triton_peers() -> ModuleType:
    """The module of both pipelines, from TRITON_PEERS."""
    file = TRITON_PEERS / "triton_peers.py"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    if str(TRITON_PEERS) not in sys.path:
        sys.path.append(str(TRITON_PEERS))
    return importlib.import_module("triton_peers")


def _triton(maker: str, copies: Sequence[Weights], shape: LayerShape) -> Peer:
    """A pipeline for each weight copy, known by the address of its first tensor."""
    make = getattr(triton_peers(), maker)
    layers = {copy[0].data_ptr(): make(*copy, top_k=shape.top_k) for copy in copies}

    def call(x: torch.Tensor, logits: torch.Tensor, *weights_and_out: torch.Tensor) -> torch.Tensor:
        return layers[weights_and_out[0].data_ptr()](x, logits, weights_and_out[-1])

    return Peer(call, copies, max_error=0.05)


def plain_torch(copies: Sequence[Weights], shape: LayerShape) -> Peer:
    """The layer in plain torch ops: gathers the chosen experts, dequantises them to bf16, bmm.

    Nothing is fused, and x and h are never quantised.
    """
    layer = partial(_torch_layer, shape.top_k)
    return Peer(layer, copies, max_error=0.02, unquantised=True, baseline=True)


def _torch_layer(
    top_k: int, x: torch.Tensor, logits: torch.Tensor, *weights_and_out: torch.Tensor
) -> torch.Tensor:
    w_up, s_up, w_down, s_down, out = weights_and_out
    top, ids = torch.softmax(logits.float(), dim=1).topk(top_k, dim=1)
    top = top / top.sum(dim=1, keepdim=True)
    chosen = ids.flatten()

    def dense(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = weight.view(torch.uint8)[chosen].view(weight.dtype).to(torch.bfloat16)
        blocks = rows.unflatten(-1, (-1, reference.BLOCK)).unflatten(-3, (-1, reference.BLOCK))
        return (blocks * scale[chosen][:, :, None, :, None].bfloat16()).view_as(rows)

    tokens = x.repeat_interleave(top_k, dim=0).unsqueeze(2)
    gate, value = torch.bmm(dense(w_up, s_up), tokens).squeeze(2).chunk(2, dim=1)
    h = torch.nn.functional.silu(gate) * value
    y = torch.bmm(dense(w_down, s_down), h.unsqueeze(2)).view(*ids.shape, -1)
    return out.copy_((y * top.unsqueeze(2)).sum(dim=1))


ADAPTERS: dict[str, Callable[[Sequence[Weights], LayerShape], Peer]] = {
    "flashinfer": flashinfer,
    "vllm_triton": vllm_triton,
    "sglang_triton": sglang_triton,
    "torch": plain_torch,
}


def find_peers(options: Options, copies: Sequence[Weights]) -> dict[str, Peer]:
    """The peers that the options want and that can run here; prints why others cannot."""
    found = {}
    for name, adapter in ADAPTERS.items():
        if options.wants(name):
            try:
                found[name] = adapter(copies, options.shape)
            except Exception as error:  # whatever a foreign package raises
                skip(name, error)
    return found
