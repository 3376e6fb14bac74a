"""Tests that tell most come first, since a session on a GPU may end before the last; and one that leaves the device
unusable fails alone: an illegal access makes every later call of its process fail.
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
    """pytest's hook: all others stay in their order."""
    items.sort(key=lambda item: next((at for at, part in enumerate(FIRST) if part in item.nodeid), len(FIRST)))


@pytest.fixture(autouse=True)
def usable_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Looks whether the device still answers; if not, ends the process, in whose place pytest-xdist starts another."""
    yield
    import torch

    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        words = f"{request.node.nodeid}: the device answers no more: {next(iter(str(error).splitlines()), '')}"
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(words, UNUSABLE)
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(words, file=sys.stderr, flush=True)
        os._exit(UNUSABLE)
