"""From a spec to a launch on the right device, with one dictionary look-up when it is warm."""

import importlib
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from cute_moe.host.compile import compile_cached
from cute_moe.host.device import device_facts, why_unsupported

Function = Callable[..., Any]
# What torch.cuda.current_device calls after a look whether CUDA is initialised; where there is a
# tensor on a GPU, it is.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def build_from(module: str) -> Callable[[Any, str], Any]:
    """`build` of a module that needs the compiler, which is imported when something is built."""

    def build(spec: Any, options: str) -> Any:
        return importlib.import_module(module).build(spec, options)

    return build


class KernelCache:
    """The compiled functions of one kernel, by spec and device.

    `lookup(key)` is the hot path: the function if `get` gave it out under `key` and it has run
    once on that device, else None. Keys are the caller's and must name the tensors' device and
    `current_device()`: where these differ, the function switches devices.
    """

    def __init__(
        self,
        build: Callable[[Any, str], Any],
        adapt: Callable[[Any, Function], Function] | None = None,
    ) -> None:
        """`build(spec, options)` returns what `cute.compile(..., options=options)` returned.

        `adapt(spec, function)` may put something in front of the compiled function. A spec may
        have an int attribute `smem_bytes`: shared memory per CTA that it needs.
        """
        self._build, self._adapt = build, adapt
        self._lock = threading.Lock()
        self._warm: set[tuple[Any, int]] = set()
        self._ready: dict[Hashable, Function] = {}
        self.lookup: Callable[[Hashable], Function | None] = self._ready.get

    def launch(self, spec: Any, device: torch.device, *arguments: Any) -> None:
        """Run the kernel of `spec` on torch's current stream of a CUDA `device`; raises as `get`.

        The compiled code checks the arguments.
        """
        key = (spec, device.index, current_device())
        (self.lookup(key) or self.get(spec, device, key))(*arguments)

    def get(self, spec: Any, device: torch.device, key: Hashable = None) -> Function:
        """The function for `spec` on a CUDA `device`, compiled or loaded from the cache if need be.

        It is for calls while the device that is now current is so. `key` makes it known to
        `lookup`. Raises RuntimeError, before anything compiles, where the device cannot run it, and
        in a stream capture when it has not yet run once on the device: the driver loads its code at
        the first launch, which a capture must not contain.
        """
        if (spec, device.index) in self._warm:
            return self._publish(key, self._function(spec, device))
        supported = torch.cuda.is_available() and device.type == "cuda"
        reason = why_unsupported(
            device_facts(device.index) if supported else None, getattr(spec, "smem_bytes", 0)
        )
        if reason:
            raise RuntimeError(f"cannot run on {device}: {reason}")
        _refuse_capture(spec, device)
        return self._first_call(spec, device, key)

    def _function(self, spec: Any, device: torch.device) -> Function:
        """The compiled function; it switches to `device` and back unless that is current now."""
        function = compile_cached(spec, lambda options: self._build(spec, options))
        if self._adapt:
            function = self._adapt(spec, function)
        if current_device() == device.index:
            return function

        def switch(*arguments: Any) -> Any:
            with torch.cuda.device(device):
                return function(*arguments)

        return switch

    def _publish(self, key: Hashable, function: Function) -> Function:
        if key is not None:
            self._ready[key] = function
        return function

    def _first_call(self, spec: Any, device: torch.device, key: Hashable) -> Function:
        """A wrapper for the first launch on a device, which marks the function as warm after."""
        function = self._function(spec, device)

        def call_first(*arguments: Any) -> Any:
            _refuse_capture(spec, device)
            # One thread loads the code; the others wait, and from then on nothing is locked.
            with self._lock:
                result = function(*arguments)
                self._warm.add((spec, device.index))
                self._publish(key, function)
            return result

        return call_first


def _refuse_capture(spec: Any, device: torch.device) -> None:
    """Raise RuntimeError while torch's current stream of `device` is being captured."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{spec!r} has not run on {device} yet: call it once before capturing a CUDA graph"
            )
