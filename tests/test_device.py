"""Device facts and the reasons why a GPU cannot be used."""

import dataclasses

import pytest
import torch

from cute_moe.host import device as device_module
from cute_moe.host.device import DeviceFacts, device_facts, has_sm90, why_unsupported

H200 = DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 232448, 50 << 20, "580.159 (CUDA 13.0)")


def test_hopper_is_supported_whatever_its_sm_count() -> None:
    assert why_unsupported(H200) is None
    assert why_unsupported(H200, 232448) is None
    assert why_unsupported(dataclasses.replace(H200, sm_count=60)) is None


def test_no_gpu() -> None:
    assert why_unsupported(None).startswith("needs an sm_90 (Hopper) GPU; ")


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_other_architectures(capability: tuple[int, int]) -> None:
    facts = dataclasses.replace(H200, name="Other", capability=capability)
    reason = why_unsupported(facts)
    assert reason == (
        "needs an sm_90 (Hopper) GPU; cuda:0 (Other) is sm_%d%d" % capability  # noqa: UP031
    )


def test_too_little_shared_memory() -> None:
    reason = why_unsupported(H200, 232449)
    assert "needs 232449 bytes" in reason and "allows 232448" in reason


def test_has_sm90_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise SystemError("driver gone")

    monkeypatch.setattr(device_module.torch.cuda, "is_available", broken)
    assert has_sm90() is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_facts_without_gpu() -> None:
    assert has_sm90() is False
    with pytest.raises(RuntimeError, match="cuda:0: no such GPU, torch sees 0"):
        device_facts(0)


@pytest.mark.gpu
def test_facts_of_the_real_device(cuda: torch.device) -> None:
    facts = device_facts(cuda.index)
    assert facts.capability == (9, 0) and facts.sm_count > 0
    assert facts.smem_optin_bytes == 227 * 1024 and facts.l2_bytes > 1 << 20
    assert "unknown" not in facts.driver
    assert device_facts(cuda.index) is facts and has_sm90()
    with pytest.raises(RuntimeError, match="no such GPU"):
        device_facts(99)
