"""Shared test set-up: GPU skipping, time limits, workers, seeding, compile cache and target.

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


GPU_TIMEOUT_S = 300  # compiling included
MAX_WORKERS = 8  # each imports torch and the compiler
SM90_INDEX = _sm90_index()
if SM90_INDEX is None:
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"


def _skip_reason() -> str:
    if not torch.cuda.is_available():
        return "no CUDA GPU here (needs sm_90)"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"no sm_90 GPU here, only {', '.join(names)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit the time of `gpu` tests; skip them, with the reason, where no sm_90 device exists."""
    for item in items:
        if item.get_closest_marker("gpu"):
            if SM90_INDEX is None:
                item.add_marker(pytest.mark.skip(reason=_skip_reason()))
            # A kernel that never ends: no signal gets through to Python while the main thread
            # waits for the GPU, so another thread ends the process.
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(GPU_TIMEOUT_S, method="thread"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker for each core, but one for a GPU, whose tests hold all of its SMs."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS) if SM90_INDEX is None else 1


def pytest_report_header() -> str:
    """Say at the top of the run whether the GPU tests run."""
    if SM90_INDEX is None:
        return f"gpu tests: skipped, {_skip_reason()}"
    return f"gpu tests: on cuda:{SM90_INDEX}, {torch.cuda.get_device_name(SM90_INDEX)}"


def workers() -> int:
    """How many processes share the run: 1 without pytest-xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))


@pytest.fixture(scope="session", autouse=True)
def private_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One compile cache per run, empty at first: results never depend on an earlier run.

    All workers of a run use it: files appear in it whole, under names that tell their content.
    """
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["CUTE_MOE_CACHE_DIR"] = str(run / "cute_moe_cache")


@pytest.fixture(scope="session", autouse=True)
def share_of_the_cores() -> None:
    """Workers that each use every core would only get in each other's way."""
    torch.set_num_threads(max(torch.get_num_threads() // workers(), 1))


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
