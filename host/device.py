"""What the host needs to know about a GPU, and why a GPU cannot run these kernels."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch

REQUIRED_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class DeviceFacts:
    """One CUDA device: sizes in bytes; `driver` as text, such as "580.159 (CUDA 13.0)"."""

    index: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_optin_bytes: int
    l2_bytes: int
    driver: str


def _driver_text() -> str:
    """Driver release and the CUDA version it offers; "unknown" for a part that cannot be read."""
    try:
        banner = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        banner = ""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", banner)
    release = found.group(1) if found else "unknown"
    try:
        from cuda.bindings import driver

        _, version = driver.cuDriverGetVersion()
        cuda = f"{version // 1000}.{version % 1000 // 10}"
    except (ImportError, RuntimeError):
        cuda = "unknown"
    return f"{release} (CUDA {cuda})"


@functools.cache
def device_facts(index: int) -> DeviceFacts:
    """Facts of cuda:`index`, read once. Raises RuntimeError where torch sees no such GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < count:
        raise RuntimeError(f"cuda:{index}: no such GPU, torch sees {count}")
    found = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        index=index,
        name=found.name,
        capability=(found.major, found.minor),
        sm_count=found.multi_processor_count,
        smem_optin_bytes=found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        l2_bytes=found.L2_cache_size,
        driver=_driver_text(),
    )


def why_unsupported(facts: DeviceFacts | None, smem_bytes: int = 0) -> str | None:
    """Why a kernel using `smem_bytes` of shared memory per CTA cannot run there; None if it can.

    `facts` None stands for "no GPU at all".
    """
    if facts is None:
        build = (
            "this torch has no CUDA support" if torch.version.cuda is None else "torch sees none"
        )
        return f"needs an sm_90 (Hopper) GPU; {build}"
    where = f"cuda:{facts.index} ({facts.name})"
    if facts.capability != REQUIRED_CAPABILITY:
        major, minor = facts.capability
        return f"needs an sm_90 (Hopper) GPU; {where} is sm_{major}{minor}"
    if facts.smem_optin_bytes < smem_bytes:
        return (
            f"needs {smem_bytes} bytes of shared memory per CTA; "
            f"{where} allows {facts.smem_optin_bytes}"
        )
    return None


def has_sm90() -> bool:
    """Whether torch's current device (or cuda:0) can run these kernels; never raises."""
    try:
        if not torch.cuda.is_available():
            return False
        return why_unsupported(device_facts(torch.cuda.current_device())) is None
    except Exception:  # A broken driver must read as "no", whatever it throws.
        return False
