"""Shared test set-up: GPU skipping, seeding, a private compile cache, and the compile target.

The environment is fixed here, before any test module can import the compiler, because the
compiler reads its variables once, at import.
"""

import os
import random

import numpy as np
import pytest
import torch


def _sm90_index() -> int | None:
    """Index of the first sm_90 GPU, or None; asks torch only, so that cutlass stays unimported."""
    if not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        if torch.cuda.get_device_capability(index) == (9, 0):
            return index
    return None


SM90_INDEX = _sm90_index()
if SM90_INDEX is None:
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"


def _skip_reason() -> str:
    if not torch.cuda.is_available():
        return "no CUDA GPU here (needs sm_90)"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"no sm_90 GPU here, only {', '.join(names)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, with the reason, where no sm_90 device exists."""
    if SM90_INDEX is not None:
        return
    skip = pytest.mark.skip(reason=_skip_reason())
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_report_header() -> str:
    """Say at the top of the run whether the GPU tests run."""
    if SM90_INDEX is None:
        return f"gpu tests: skipped, {_skip_reason()}"
    return f"gpu tests: on cuda:{SM90_INDEX}, {torch.cuda.get_device_name(SM90_INDEX)}"


@pytest.fixture(scope="session", autouse=True)
def private_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One empty compile cache per session: results never depend on an earlier run."""
    os.environ["CUTE_MOE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cute_moe_cache"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def cuda() -> torch.device:
    """The sm_90 device as torch's current device; for tests marked `gpu`."""
    if SM90_INDEX is None:
        pytest.skip(_skip_reason())
    device = torch.device("cuda", SM90_INDEX)
    torch.cuda.set_device(device)
    return device
