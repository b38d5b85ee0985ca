"""A test that never ends is ended: the rest of the run, and its summary, must not hang with it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The set-up of tests/conftest.py with a GPU, seemingly, and little patience.
PLUGIN = """
import faulthandler
import conftest
faulthandler.dump_traceback_later(300, exit=True)  # Nothing may be left behind if this test fails.
conftest.SM90_INDEX, conftest.GPU_TIMEOUT_S = 0, 2
"""
# A thread that locks a mutex twice waits in C, without the interpreter's lock, and starts to wait
# again after every signal: like one in cudaDeviceSynchronize.
STUCK = """
import ctypes
import pytest

@pytest.mark.gpu
def test_stuck():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)

@pytest.mark.gpu
def test_next():
    pass
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """pytest on a stuck test and on one after it, with this project's settings."""
    (folder / "impatient.py").write_text(PLUGIN)
    (folder / "test_stuck.py").write_text(STUCK)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-q"]
    command += ["-p", "no:cacheprovider", "-p", "conftest", "-p", "impatient", *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT / "tests")])
    return subprocess.run(
        [*command, str(folder)], env=environment, capture_output=True, text=True, timeout=200
    )


def test_a_stuck_gpu_test_ends_the_process(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode not in (0, 5), done
    assert "Timeout" in done.stderr + done.stdout and "in test_stuck" in done.stderr + done.stdout
    assert "passed" not in done.stdout


def test_a_worker_takes_the_stuck_test_with_it_alone(tmp_path: Path) -> None:
    """As in `make gpu-test`: the others run, and the summary names the one that was stuck."""
    done = run(tmp_path, "-n", "auto", "--dist", "worksteal")
    assert "1 failed, 1 passed" in done.stdout, done
    assert "crashed while running 'test_stuck.py::test_stuck'" in done.stdout, done
