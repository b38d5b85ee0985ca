"""A torch module that holds one block-FP8 MoE layer and runs it with `mono_moe`."""

import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from cute_moe.checkpoint import LayerTensors, load_layer
from cute_moe.checkpoint_config import DEFAULT_TOP_K, ModelConfig
from cute_moe.host.check import check_tensor
from cute_moe.kernels.moe.spec import MAX_TOKENS
from cute_moe.moe import alloc_scratchpad, get_scratchpad_size_bytes, has_monomoe, mono_moe

EXPERT_TENSORS = ("w_up", "s_up", "w_down", "s_down")
ADDRESS_BITS = 15  # of an address: all zero where it is aligned as `mono_moe` asks
NO_GPU = -1  # as `Tensor.get_device` says
UNKNOWN = -2  # no device has this index
# The scratchpads of layers that were given none, by device and size: equal sizes are one layout.
_SHARED: weakref.WeakValueDictionary[tuple[torch.device, int], torch.Tensor]
_SHARED = weakref.WeakValueDictionary()
_SHARED_LOCK = threading.Lock()


class MoELayer(torch.nn.Module):
    """One MoE layer for inference: the routed experts, without a shared expert.

    Buffers `w_up`, `s_up`, `w_down`, `s_down` and, where the checkpoint has it, `router_weight`,
    as in `LayerTensors`, of any shape that `mono_moe` takes; they keep their dtype under
    `.to(dtype)`, `.half()` and the like. All layers of one layout (equal top_k * N) on a device
    share one scratchpad, so their calls must not overlap: one stream at a time. A layer that runs
    beside others is made with a `scratchpad` of its own, which it uses while its weights are on
    that device. The scratchpad is no part of its state, and copies have the shared one.
    `programmatic` (False) may be set at any time; see `mono_moe` for it and for `activations`.
    Nothing here depends on autocast.
    """

    w_up: torch.Tensor
    s_up: torch.Tensor
    w_down: torch.Tensor
    s_down: torch.Tensor
    router_weight: torch.Tensor | None

    def __init__(
        self,
        tensors: LayerTensors,
        top_k: int = DEFAULT_TOP_K,
        scoring_func: str = "softmax",
        renormalize: bool = True,
        activations: str = "fp8",
        scratchpad: torch.Tensor | None = None,
    ) -> None:
        """Takes the tensors as they are, without a copy; raises as `mono_moe` does.

        scratchpad: from `alloc_scratchpad` for this shape, on the device of the tensors.
        """
        super().__init__()
        for name in EXPERT_TENSORS:
            tensor = getattr(tensors, name, None)
            check_tensor(name, tensor)
            if tensor.dim() != 3:
                raise ValueError(f"{name}: expected 3 dimensions, got {list(tensor.shape)}")
        self.top_k, self.scoring_func, self.renormalize = top_k, scoring_func, renormalize
        self.activations, self.programmatic = activations, False
        for name in (*EXPERT_TENSORS, "router_weight"):
            self.register_buffer(name, getattr(tensors, name))
        self._given = self._scratchpad = scratchpad
        self._scratchpad_index = self.w_up.get_device()
        self._check_weights()
        self._follow_weights(UNKNOWN)

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | Path,
        layer: int,
        device: torch.device | str | int | None = None,
        top_k: int | None = None,
        scoring_func: str | None = None,
        renormalize: bool | None = None,
        activations: str = "fp8",
        progress: bool = True,
        shared_expert: str = "refuse",
        scratchpad: torch.Tensor | None = None,
    ) -> "MoELayer":
        """Layer `layer` of a block-FP8 safetensors checkpoint.

        `device` None means the GPU if it can run the kernel, else the CPU; an int is the index of
        a GPU. What is None of the routing comes from config.json, or is 8, "softmax", True.
        `shared_expert` "ignore" reads a layer without its shared expert, for callers who add that
        one's result themselves; "refuse" rather raises. Raises CheckpointError (a ValueError) when
        the checkpoint cannot be read or asks for arithmetic that the layer does not do.
        """
        given = {"top_k": top_k, "scoring_func": scoring_func, "renormalize": renormalize}
        routing = ModelConfig.read(directory).routing(given)
        if device is None:
            device = "cuda" if has_monomoe() else "cpu"
        tensors = load_layer(directory, layer, device, progress, shared_expert)
        return cls(tensors, activations=activations, scratchpad=scratchpad, **routing)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """hidden_states [.., K] bf16, router_logits [.., E] bf16 or fp32 -> new [.., K] bf16.

        Any strides and addresses; what is not contiguous and 16-byte aligned is copied. More than
        8 tokens run as one launch per 8: each token gets the same bits as alone. Raises ValueError
        or TypeError as `mono_moe` does.
        """
        try:
            shape = hidden_states.shape
            if len(shape) == 2 and shape[0] <= MAX_TOKENS:  # a decode step
                x, logits = hidden_states.contiguous(), router_logits.contiguous()
                if (x.data_ptr() | logits.data_ptr()) & ADDRESS_BITS:
                    x, logits = _aligned(x), _aligned(logits)
                return self._run(x, logits)
        except (AttributeError, RuntimeError):
            _check_inputs(hidden_states, router_logits)
            raise
        return self._run_in_chunks(hidden_states, router_logits)

    @torch.no_grad()
    def router_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [.., K] -> logits [.., E], by the checkpoint's router and in its dtype.

        Raises TypeError or ValueError for other hidden_states, RuntimeError when the checkpoint
        had no router.
        """
        weight = self.router_weight
        if weight is None:
            raise RuntimeError("router_weight: the checkpoint of this layer has no router")
        check_tensor("hidden_states", hidden_states)
        if hidden_states.shape[-1:] != weight.shape[1:] or hidden_states.device != weight.device:
            raise ValueError(
                f"hidden_states: expected [.., {weight.shape[1]}] on {weight.device}, "
                f"got {list(hidden_states.shape)} on {hidden_states.device}"
            )
        device_type = weight.device.type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return linear(hidden_states.to(weight.dtype), weight)
        return linear(hidden_states.to(weight.dtype), weight)

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
        # As attributes, each buffer would cost a microsecond; keywords cost a sixth of one.
        buffers: dict[str, Any] = self._buffers
        w_up = buffers["w_up"]
        if w_up.get_device() != self._scratchpad_index:
            self._follow_weights(self._scratchpad_index)
        return mono_moe(
            x, logits, w_up, buffers["s_up"], buffers["w_down"], buffers["s_down"], self.top_k,
            self.scoring_func, self.renormalize, out, self._scratchpad, True, self.activations,
            self.programmatic,
        )  # fmt: skip

    def _run_in_chunks(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor:
        """`forward` for any number of tokens and of leading sizes."""
        _check_inputs(hidden_states, router_logits)
        shape = hidden_states.shape
        if not shape:
            raise ValueError("hidden_states: expected [.., K], got no dimension")
        if shape[:-1] != router_logits.shape[:-1]:
            raise ValueError(
                "router_logits: expected the leading sizes of hidden_states, "
                f"{list(shape[:-1])}; got {list(router_logits.shape)}"
            )
        tokens = math.prod(shape[:-1])
        x = _aligned(hidden_states.reshape(tokens, shape[-1]))
        logits = _aligned(router_logits.reshape(tokens, router_logits.shape[-1]))
        out = torch.empty_like(x)
        for first in range(0, max(tokens, 1), MAX_TOKENS):
            rows = slice(first, first + MAX_TOKENS)
            self._run(x[rows], logits[rows], out[rows])
        return out.view(shape)

    def _check_weights(self) -> None:
        """A call without tokens: checks every tensor and option, computes nothing."""
        experts, hidden = self.w_down.shape[:2]
        x = self.w_up.new_empty(0, hidden, dtype=torch.bfloat16)
        self._run(x, x.new_empty(0, experts))
        router = self.router_weight
        if router is not None and (
            router.shape != (experts, hidden)
            or not router.is_floating_point()
            or router.device != self.w_up.device
        ):
            raise ValueError(
                f"router_weight: expected [{experts}, {hidden}] of floats on {self.w_up.device}, "
                f"got {list(router.shape)} {router.dtype} on {router.device}"
            )

    def _follow_weights(self, index_before: int) -> None:
        """Sees to a scratchpad on the GPU of the weights, unless that is `index_before`."""
        index = self.w_up.get_device()
        if index == index_before:
            return
        given, device = self._given, self.w_up.device
        if given is not None and given.device == device:
            self._scratchpad = given
        else:
            self._scratchpad = self._shared_scratchpad(device) if device.type == "cuda" else None
        self._scratchpad_index = index

    def _shared_scratchpad(self, device: torch.device) -> torch.Tensor:
        """The one of this layer's layout and a GPU, made if there is none yet."""
        experts, hidden, intermediate = self.w_down.shape
        sizes: dict[str, int] = dict(
            num_experts=experts, hidden=hidden, intermediate=intermediate, top_k=self.top_k
        )
        key = (device, get_scratchpad_size_bytes(**sizes))
        with _SHARED_LOCK:
            pad = _SHARED.get(key)
            if pad is None:
                if torch.cuda.is_current_stream_capturing():
                    # Only a replay would zero memory from here; a launch before it would hang.
                    raise RuntimeError(
                        "scratchpad: cannot be made inside the capture of a CUDA graph; call the "
                        "layer once, with its weights where they are now, before the capture"
                    )
                pad = alloc_scratchpad(device, **sizes)
                if type(pad) is torch.Tensor:  # not one without memory, of a tracer
                    _SHARED[key] = pad
        return pad

    def __setattr__(self, name: str, value: Any) -> None:
        """Weights stay buffers, also when a Parameter is assigned; the scratchpad follows them."""
        if name in EXPERT_TENSORS or name == "router_weight":
            value = value.detach() if isinstance(value, torch.nn.Parameter) else value
        super().__setattr__(name, value)
        if "_scratchpad_index" not in self.__dict__:
            return
        if name == "w_up" and value is not None:
            self._follow_weights(self._scratchpad_index)
        elif name in ("top_k", "w_down"):  # perhaps another layout
            self._scratchpad_index = UNKNOWN

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: all but the scratchpad, which may be in use."""
        own = ("_given", "_scratchpad", "_scratchpad_index")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._given = None
        self._follow_weights(UNKNOWN)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves the buffers as torch asks, but never casts them: e4m3 means nothing in bf16."""

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            probe = fn(tensor.new_empty(0))
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        super()._apply(keep_dtype, recurse)
        self._follow_weights(self._scratchpad_index)
        return self


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where it is not contiguous or not 16-byte aligned."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() & ADDRESS_BITS else tensor


def _check_inputs(hidden_states: object, router_logits: object) -> None:
    check_tensor("hidden_states", hidden_states)
    check_tensor("router_logits", router_logits)
