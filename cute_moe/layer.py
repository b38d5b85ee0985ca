"""A torch module that holds one block-FP8 MoE layer and runs it with `mono_moe`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cute_moe.checkpoint import CheckpointError, LayerTensors, load_layer, read_config
from cute_moe.kernels.moe.spec import MAX_TOKENS
from cute_moe.moe import alloc_scratchpad, has_monomoe, mono_moe

DEFAULT_TOP_K = 8
# Routing that the layer does not do: a config.json with another value than these is refused.
PLAIN_ROUTING: dict[str, tuple[object, ...]] = {
    "n_group": (None, 0, 1),
    "routed_scaling_factor": (None, 1),
    "topk_method": (None, "greedy"),
}


class MoELayer(torch.nn.Module):
    """One MoE layer for inference: the routed experts, without a shared expert.

    Buffers `w_up`, `s_up`, `w_down`, `s_down` and, where the checkpoint has it, `router_weight`,
    as in `LayerTensors`; they keep their dtype under `.to(dtype)`, `.half()` and the like. The
    layer owns one scratchpad, so its calls must not overlap: one stream at a time.
    `programmatic` (False) may be set at any time; see `mono_moe` for it and for `activations`.
    """

    def __init__(
        self,
        tensors: LayerTensors,
        top_k: int = DEFAULT_TOP_K,
        scoring_func: str = "softmax",
        renormalize: bool = True,
        activations: str = "fp8",
    ) -> None:
        """Takes the tensors as they are, without a copy; raises as `mono_moe` does."""
        super().__init__()
        self.top_k, self.scoring_func, self.renormalize = top_k, scoring_func, renormalize
        self.activations, self.programmatic = activations, False
        for name in ("w_up", "s_up", "w_down", "s_down", "router_weight"):
            self.register_buffer(name, getattr(tensors, name))
        self._scratchpad = _scratchpad_on(self.w_up.device)
        self._check_weights()

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | Path,
        layer: int,
        device: torch.device | str | None = None,
        top_k: int | None = None,
        scoring_func: str | None = None,
        renormalize: bool | None = None,
        activations: str = "fp8",
        progress: bool = True,
    ) -> "MoELayer":
        """Layer `layer` of a block-FP8 safetensors checkpoint.

        `device` None means the GPU if it can run the kernel, else the CPU. What is None of the
        routing comes from config.json, or is 8, "softmax", True. Raises CheckpointError (a
        ValueError) when the checkpoint cannot be read or routes in a way the layer does not.
        """
        config = routing_of(read_config(directory))
        given = {"top_k": top_k, "scoring_func": scoring_func, "renormalize": renormalize}
        routing = {**config, **{name: v for name, v in given.items() if v is not None}}
        if device is None:
            device = "cuda" if has_monomoe() else "cpu"
        tensors = load_layer(directory, layer, device, progress)
        return cls(tensors, activations=activations, **routing)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """hidden_states [.., K] bf16, router_logits [.., E] bf16 or fp32 -> new [.., K] bf16.

        More than 8 tokens run as one launch per 8: each token gets the same bits as alone. Raises
        ValueError or TypeError as `mono_moe` does.
        """
        shape = hidden_states.shape
        if len(shape) == router_logits.dim() == 2 and shape[0] <= MAX_TOKENS:  # a decode step
            return self._run(hidden_states.contiguous(), router_logits.contiguous())
        if not shape or shape[:-1] != router_logits.shape[:-1]:
            raise ValueError(
                "router_logits: expected the leading sizes of hidden_states, "
                f"{list(shape[:-1])}; got {list(router_logits.shape)}"
            )
        tokens = math.prod(shape[:-1])
        x = hidden_states.reshape(tokens, shape[-1]).contiguous()
        logits = router_logits.reshape(tokens, router_logits.shape[-1]).contiguous()
        out = torch.empty_like(x)
        for first in range(0, max(tokens, 1), MAX_TOKENS):
            rows = slice(first, first + MAX_TOKENS)
            self._run(x[rows], logits[rows], out[rows])
        return out.view(shape)

    @torch.no_grad()
    def router_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [.., K] -> logits [.., E], by the router of the checkpoint.

        Raises RuntimeError when the checkpoint had none.
        """
        if self.router_weight is None:
            raise RuntimeError("router_weight: the checkpoint of this layer has no router")
        return torch.nn.functional.linear(
            hidden_states.to(self.router_weight.dtype), self.router_weight
        )

    def extra_repr(self) -> str:
        """Sizes and routing, for `print`."""
        experts, hidden, intermediate = self.w_down.shape
        return (
            f"experts={experts}, hidden={hidden}, intermediate={intermediate}, "
            f"top_k={self.top_k}, scoring_func={self.scoring_func!r}, "
            f"renormalize={self.renormalize}"
        )

    def _run(
        self, x: torch.Tensor, logits: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        buffers = self._buffers  # as attributes, each would cost a microsecond
        return mono_moe(
            x,
            logits,
            buffers["w_up"],
            buffers["s_up"],
            buffers["w_down"],
            buffers["s_down"],
            self.top_k,
            self.scoring_func,
            self.renormalize,
            out=out,
            scratchpad=self._scratchpad,
            activations=self.activations,
            programmatic=self.programmatic,
        )

    def _check_weights(self) -> None:
        """A call without tokens: checks every tensor and option, computes nothing."""
        experts, hidden = self.w_down.shape[:2]
        x = self.w_up.new_empty(0, hidden, dtype=torch.bfloat16)
        self._run(x, x.new_empty(0, experts))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves the buffers as torch asks, but never casts them: e4m3 means nothing in bf16."""

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            probe = fn(tensor.new_empty(0))
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        super()._apply(keep_dtype, recurse)
        if self._scratchpad is None or self._scratchpad.device != self.w_up.device:
            self._scratchpad = _scratchpad_on(self.w_up.device)
        return self


def routing_of(config: dict[str, Any]) -> dict[str, Any]:
    """top_k, scoring_func and renormalize of a `read_config`; CheckpointError on other routing."""
    for name, plain in PLAIN_ROUTING.items():
        if config.get(name) not in plain:
            raise CheckpointError(
                f"config.json: {name} = {config[name]!r} asks for a routing that is not supported"
            )
    return {
        "top_k": config.get("num_experts_per_tok", DEFAULT_TOP_K),
        "scoring_func": config.get("scoring_func", "softmax"),
        "renormalize": config.get("norm_topk_prob", True),
    }


def _scratchpad_on(device: torch.device) -> torch.Tensor | None:
    return alloc_scratchpad(device) if device.type == "cuda" else None
