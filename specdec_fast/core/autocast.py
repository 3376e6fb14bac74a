"""Passes without autocast: caches and kernels have one dtype, and texts do not depend on the caller's mode.

Tests: tests/targets/test_global_settings.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context in which autocast is off for a device. It costs nothing where autocast is off already."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _NOTHING
