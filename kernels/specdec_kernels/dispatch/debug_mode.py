"""Debug mode: launches check their data before they run, as operators on a CPU do.

The checks wait for the device at every call, so they are off unless SPECDEC_DEBUG=1 is in the environment at import.
They cover calls of the operators, and those calls of torch.ops.specdec that Triton serves, for example in compiled
programs. They do not cover what CUDA C++ serves under torch.ops.specdec (kv_stage and commits, where it is built),
because no Python runs there.

On every device, operators warn about rows of probabilities in place of logits, which they would accept silently.
Tests: tests/interpreter/test_debug_mode.py, tests/kernels/test_probabilities_for_logits.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

ENABLED = os.environ.get("SPECDEC_DEBUG", "") not in ("", "0")
"""Whether launches check their data."""
INTEGER_DTYPES = (torch.int32, torch.int64)


def is_capturing() -> bool:
    """Returns whether launches are being captured into a graph instead of running."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _copy_integers_to_host(value: Any) -> Any:
    """Copies an integer tensor to the host, because checks read integers and may write to them."""
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) and value.dtype in INTEGER_DTYPES else value


def with_data_check(run: Callable[..., Any], check_data: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a launch that checks its data first. Captured calls skip the check, because they cannot wait."""

    @wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            named = {
                name: _copy_integers_to_host(each) for name, each in kwargs.items() if name not in ("out", "workspace")
            }
            check_data(*map(_copy_integers_to_host, args), **named)
        return run(*args, **kwargs)

    return checked


def are_probabilities(logits: object) -> bool:
    """Returns whether all rows of a value look like probabilities: numbers within [0, 1] with a sum of 1."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point() or logits.numel() == 0:
        return False
    rows = logits.float()
    in_range = ((rows >= 0) & (rows <= 1)).all()
    return bool(in_range & ((rows.sum(1) - 1).abs() < 1e-3).all())


def with_logits_check(op: str, reference: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a backend warn about probabilities in place of logits.

    Args:
        op: Name of the operator.
        reference: Reference of the operator, which names the parameters: logits, or distributions that contain them.
        run: Callable of the backend.

    Returns:
        The callable with the check, or `run` itself if the operator takes no logits.
    """
    names = list(signature(reference).parameters)
    watched_names = [name for name in names if name in ("logits", "target", "draft")]
    if not watched_names:
        return run

    @wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args)) | kwargs
        for name in () if is_capturing() else watched_names:
            value = arguments.get(name)
            logits = value[0] if isinstance(value, (tuple, list)) and value else value
            if are_probabilities(logits):
                warnings.warn(
                    f"{op}: {name} has rows of numbers from 0 to 1 that sum to 1; expected logits, not probabilities; "
                    "pass probs.log()",
                    stacklevel=2,
                )
        return run(*args, **kwargs)

    return checked
