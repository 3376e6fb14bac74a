"""Debug mode: launches look at their data first, as operators on a CPU do, and raise instead of passing over it.

That waits for the device at every call, so it is off unless SPECDEC_DEBUG=1 is in the environment at import. Calls of
the operators are looked at, and those of torch.ops.specdec, from compiled programs for example, that Triton serves.
What CUDA C++ serves under torch.ops.specdec (kv_stage and commits, where it is built) gets no look there: no Python is
run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

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
