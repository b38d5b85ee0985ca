"""Scratch memory of a kernel: named regions declared once, in one uint8 buffer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cute_moe.host.check import Contract, TensorRule
from cute_moe.kernels.device.sizes import round_up

BASE_ALIGN = 128


@dataclass(frozen=True)
class Region:
    """`nbytes` of scratch at a multiple of `align` bytes (a power of two, at most 128).

    `zeroed`: the kernel needs zeros there before its first launch and keeps the region in order
    afterwards. The other regions may hold anything at any launch.
    """

    name: str
    nbytes: int
    align: int = BASE_ALIGN
    zeroed: bool = False


class ScratchLayout:
    """Where each region lies; `nbytes` is the size of the whole buffer, a multiple of 128."""

    def __init__(self, regions: Sequence[Region]) -> None:
        """Lay the regions out in the order given. Raises ValueError on a bad declaration."""
        self.regions = tuple(regions)
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for region in self.regions:
            if region.align not in (1, 2, 4, 8, 16, 32, 64, 128):
                raise ValueError(
                    f"{region.name}: expected align as a power of two up to {BASE_ALIGN}, "
                    f"got {region.align}"
                )
            if region.nbytes < 0 or region.name in self._places:
                raise ValueError(
                    f"{region.name}: expected a new name and nbytes >= 0, got {region}"
                )
            start = round_up(end, region.align)
            end = start + region.nbytes
            self._places[region.name] = (start, end)
        self.nbytes = round_up(end, BASE_ALIGN)

    def offset(self, name: str) -> int:
        """First byte of a region; KeyError for an unknown name."""
        return self._places[name][0]

    def allocate(self, device: torch.device | str | int) -> torch.Tensor:
        """A buffer for this layout: uint8 [nbytes], all zeros, at a multiple of 128 bytes.

        It is ordered on the current stream of `device`.
        """
        buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        if buffer.data_ptr() % BASE_ALIGN == 0:  # always so on a GPU
            return buffer
        buffer = torch.zeros(self.nbytes + BASE_ALIGN, dtype=torch.uint8, device=device)
        start = -buffer.data_ptr() % BASE_ALIGN
        return buffer[start : start + self.nbytes]

    def check(
        self, tensor: torch.Tensor, device: torch.device | None = None, name: str = "scratchpad"
    ) -> None:
        """Raise unless `tensor` is uint8 [nbytes], contiguous, 128-byte aligned.

        Exactly so: a larger buffer may be another layout's, whose words mean something else. It
        must be on `device`, if given. TypeError for what is no tensor, else ValueError.
        """
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype is torch.uint8
            and tensor.device == (tensor.device if device is None else device)
            and tensor.shape == (self.nbytes,)
            and tensor.is_contiguous()
            and tensor.data_ptr() % BASE_ALIGN == 0
        ):
            return
        rule = TensorRule(name, (torch.uint8,), (self.nbytes,), BASE_ALIGN)
        Contract([rule]).check([tensor], device)

    def view(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The bytes of one region of a buffer: uint8 [nbytes of the region]."""
        start, end = self._places[name]
        return tensor[start:end]
