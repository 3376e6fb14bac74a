"""The launch suite (`make lane-launch`): every step from a Python call to the kernel, on simulated GPUs.

Every test here is skipped if no GPU can be simulated: with a real GPU, without Triton, in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec_kernels import simulated_gpu

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = simulated_gpu.unavailable_reason()
    for item in items:
        if HERE in item.path.parents and reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def gpu() -> Iterator[simulated_gpu.Gpu]:
    """Two simulated GPUs of Hopper's architecture."""
    with simulated_gpu.gpu("sm_90", devices=2) as made:
        yield made
