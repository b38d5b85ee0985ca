"""The scratch layout: offsets, total size, zero contract and the check of a user's buffer."""

import pytest
import torch

from cute_moe.host.scratch import Region, ScratchLayout

LAYOUT = ScratchLayout(
    [
        Region("epoch", 4, zeroed=True),
        Region("flags", 12, align=4, zeroed=True),
        Region("rows", 1000, align=16),
        Region("end", 1),
    ]
)


def test_offsets_follow_alignment_and_order() -> None:
    assert [LAYOUT.offset(r.name) for r in LAYOUT.regions] == [0, 4, 16, 1024]
    assert LAYOUT.nbytes == 1152


def aligned(nbytes: int, past: int = 0) -> torch.Tensor:
    """Zeros [nbytes] whose address is `past` bytes past a multiple of 128; CPU memory is not."""
    buffer = torch.zeros(nbytes + 256, dtype=torch.uint8)
    start = -buffer.data_ptr() % 128 + past
    return buffer[start : start + nbytes]


def test_views_cover_disjoint_bytes() -> None:
    buffer = LAYOUT.allocate("cpu")
    assert buffer.dtype == torch.uint8 and buffer.shape == (1152,) and not buffer.any()
    for number, region in enumerate(LAYOUT.regions, start=1):
        view = LAYOUT.view(buffer, region.name)
        assert view.numel() == region.nbytes and not view.any()
        view.fill_(number)
    assert int(LAYOUT.view(buffer, "rows").sum()) == 3000
    with pytest.raises(KeyError):
        LAYOUT.offset("missing")


def test_good_buffers_pass() -> None:
    LAYOUT.check(aligned(1152))
    LAYOUT.check(aligned(1152), torch.device("cpu"))


@pytest.mark.parametrize(
    ("buffer", "got"),
    [
        (aligned(1151), "got [1151] uint8, on cpu"),
        (aligned(1280), "got [1280] uint8, on cpu"),
        (aligned(1152).view(torch.int8), "got [1152] int8, on cpu"),
        (aligned(2304).view(2, 1152), "got [2, 1152] uint8, on cpu"),
        (aligned(2304)[::2], "strides [2], on cpu"),
        (aligned(1152, past=4), "address 4 bytes past 128-byte alignment"),
        (aligned(0), "got [0] uint8, on cpu"),
    ],
)
def test_bad_buffers(buffer: torch.Tensor, got: str) -> None:
    with pytest.raises(ValueError) as caught:
        LAYOUT.check(buffer)
    text = str(caught.value)
    assert text.startswith(
        "scratchpad: expected [1152] uint8, contiguous, 128-byte aligned, on cpu; "
    )
    assert got in text


def test_wrong_device_and_type() -> None:
    buffer = aligned(1152)
    with pytest.raises(ValueError, match=r"^mine: expected .* on cuda:1.* on cpu$"):
        LAYOUT.check(buffer, torch.device("cuda", 1), name="mine")
    with pytest.raises(TypeError, match="scratchpad: expected a torch.Tensor, got NoneType"):
        LAYOUT.check(None)


def test_bad_declarations() -> None:
    with pytest.raises(ValueError, match="power of two"):
        ScratchLayout([Region("a", 1, align=3)])
    with pytest.raises(ValueError, match="new name"):
        ScratchLayout([Region("a", 1), Region("a", 1)])
    with pytest.raises(ValueError, match="nbytes >= 0"):
        ScratchLayout([Region("a", -1)])


def test_allocations_are_always_aligned() -> None:
    """CPU memory comes at any multiple of 64 bytes, or less where another allocator serves."""
    for nbytes in (1, 100, 1152, 70_000, 300_000):
        layout = ScratchLayout([Region("all", nbytes, zeroed=True)])
        buffers = [layout.allocate("cpu") for _ in range(32)]
        for buffer in buffers:
            layout.check(buffer, torch.device("cpu"))
            assert buffer.shape == (layout.nbytes,) and not buffer.any()
            buffer.fill_(7)
        assert all((buffer == 7).all() for buffer in buffers)


@pytest.mark.gpu
def test_allocation_on_the_gpu(cuda: torch.device) -> None:
    buffer = LAYOUT.allocate(cuda)
    LAYOUT.check(buffer, cuda)
    assert not buffer.any()
