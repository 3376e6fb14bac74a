"""Debug mode: launches look at their data first, as operators on a CPU do, and raise instead of passing over it.

That waits for the device at every call, so it is off unless SPECDEC_DEBUG=1 is in the environment at import. Calls of
the operators are looked at, and those of torch.ops.specdec, from compiled programs for example, that Triton serves.
What CUDA C++ serves under torch.ops.specdec (kv_stage and commits, where it is built) gets no look there: no Python is
run.

On every device, rows of probabilities in place of logits are warned about: an operator would take them in silence.
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
"""Whether operators that can be watched are."""
INTEGER_DTYPES = (torch.int32, torch.int64)


def is_capturing() -> bool:
    """Whether launches go into a graph now, and do not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _copy_integers_to_host(value: Any) -> Any:
    """Integers, which are what is looked at, on the host; in memory of their own, since a look may write to them."""
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) and value.dtype in INTEGER_DTYPES else value


def with_data_check(run: Callable[..., Any], look: Callable[..., Any]) -> Callable[..., Any]:
    """The launch behind a look at its data, but for calls that are captured: those cannot wait."""

    @wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            named = {
                name: _copy_integers_to_host(each) for name, each in kwargs.items() if name not in ("out", "workspace")
            }
            look(*map(_copy_integers_to_host, args), **named)
        return run(*args, **kwargs)

    return checked


def are_probabilities(logits: object) -> bool:
    """Whether a value has rows that can hardly be anything but probabilities: all within [0, 1], sums of 1."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point() or logits.numel() == 0:
        return False
    rows = logits.float()
    in_range = ((rows >= 0) & (rows <= 1)).all()
    return bool(in_range & ((rows.sum(1) - 1).abs() < 1e-3).all())


def with_logits_check(op: str, reference: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that first warns about probabilities in place of logits; the backend itself where none are taken.

    Args:
        op: Name of the operator.
        reference: Its reference, which names the parameters: logits, or distributions, whose first part they are.
        run: The backend.
    """
    names = list(signature(reference).parameters)
    watched_names = [name for name in names if name in ("logits", "target", "draft")]
    if not watched_names:
        return run

    @wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        for name in () if is_capturing() else watched_names:
            value = given.get(name)
            logits = value[0] if isinstance(value, (tuple, list)) and value else value
            if are_probabilities(logits):
                warnings.warn(
                    f"{op}: {name} has rows of numbers from 0 to 1 that sum to 1; expected logits, not probabilities; "
                    "pass probs.log()",
                    stacklevel=2,
                )
        return run(*args, **kwargs)

    return checked
