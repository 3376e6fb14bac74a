"""Runs a module or tests on a simulated GPU, to try a GPU session without a GPU.

    python -m benchmarks.gpu.rehearsal benchmarks.step --shape tiny
    python -m pytest -p benchmarks.gpu.rehearsal tests/gpu

With SPECDEC_RECORD_KEYS=FOLDER, Triton's keys are recorded there (`benchmarks.gpu.kernel_cache`).
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.gpu.kernel_cache import ARCHITECTURE, recorded_keys
from benchmarks.kernels.nvidia_tools import REHEARSAL

_entered = ExitStack()


def enter(stack: ExitStack) -> None:
    """Simulates a GPU until the stack is closed."""
    from specdec_kernels import simulated_gpu

    os.environ[REHEARSAL] = "1"
    if folder := os.environ.get("SPECDEC_RECORD_KEYS"):
        stack.enter_context(recorded_keys(Path(folder)))
    stack.enter_context(simulated_gpu.gpu(ARCHITECTURE))


def pytest_configure() -> None:
    """pytest's hook: before tests are collected, because tests check for a GPU when they are collected."""
    enter(_entered)


def pytest_unconfigure() -> None:
    """pytest's hook."""
    _entered.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m benchmarks.gpu.rehearsal MODULE [ARGUMENTS]")
    sys.argv = sys.argv[1:]
    with ExitStack() as stack:
        enter(stack)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
