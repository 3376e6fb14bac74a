"""The most informative tests run first, and a test that breaks the device fails alone.

Time on a GPU may end before the last test. An illegal access makes every later call of its process fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

FIRST = ("test_every_kernel_runs", "test_captured_steps", "gpu/test_capture.py")
UNUSABLE = 70
"""Exit status."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves these tests to the front; all others keep their order."""
    items.sort(key=lambda item: next((at for at, part in enumerate(FIRST) if part in item.nodeid), len(FIRST)))


@pytest.fixture(autouse=True)
def usable_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that the device still works. If not, ends the process, and pytest-xdist starts another."""
    yield
    import torch

    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        words = f"{request.node.nodeid}: the device no longer works: {next(iter(str(error).splitlines()), '')}"
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(words, UNUSABLE)
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(words, file=sys.stderr, flush=True)
        os._exit(UNUSABLE)
