"""The interpreter suite: Triton's interpreter, in its own process with TRITON_INTERPRET=1 (`make lane-interpreter`).

Every test in this folder is marked `interpreter` and skipped in any other process. Tensors can be guarded, overflow
checks are on, and bfloat16 is correct (`tests/oracles/interpreter.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec_kernels import use_backend
from specdec_kernels.triton_shared.triton_backend import INTERPRETED

HERE = Path(__file__).parent
NUMPY = "ignore::RuntimeWarning:triton.runtime.interpreter"  # it computes both sides of every choice


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None if INTERPRETED else "needs TRITON_INTERPRET=1 before triton is imported: make lane-interpreter"
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.interpreter)
            item.add_marker(pytest.mark.filterwarnings(NUMPY))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def test_bed() -> None:
    if INTERPRETED:
        from oracles.interpreter import install

        install()


@pytest.fixture
def on_triton() -> Iterator[None]:
    """Operators run on their Triton backends, or raise."""
    with use_backend("triton"):
        yield
