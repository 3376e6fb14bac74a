"""Launches of Triton kernels do not read from the device or copy from the host, so CUDA graphs can capture them.

The kernels themselves are empty here, and values are not checked, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.capture_guard import capture_guard

from specdec_kernels import OPS
from specdec_kernels.dispatch import argument_checks
from specdec_kernels.testing.agreement import make_sample
from specdec_kernels.testing.samples_attention import Sizes
from specdec_kernels.triton_shared import triton_backend

if triton_backend.importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

SIZES = Sizes(rows=2, nodes=4, vocab=40, length=20, heads=2, kv_heads=1, width=16)
INSPECTS = {"rejection_thresholds", "recursive_rejection_thresholds", "traversal_thresholds"}
"""Made to be looked at: they may ask how deep trees are."""


def launches() -> list[str]:
    return [name for name, op in OPS.items() if any(backend.name == "triton" for backend in op.backends)]


@pytest.mark.parametrize("name", sorted(set(launches()) - INSPECTS))
def test_a_launch_can_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    call, op = make_sample(name, SIZES), OPS[name]
    (backend,) = (each for each in op.backends if each.name == "triton")
    launch, launched = backend.load(), []

    def nothing(kernel: Any, grid: Any) -> Any:
        launched.append(kernel)
        return lambda *args, **kwargs: None

    monkeypatch.setattr(JITFunction, "__getitem__", nothing)
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # some index by results of their kernels
    with torch.inference_mode(), capture_guard():
        launch(*call.arguments, **call.options)
    assert launched
