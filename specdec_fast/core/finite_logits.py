"""Checks that logits of draft models and heads have a distribution. Tests: tests/engine/test_nan_drafts.py."""

from __future__ import annotations

import torch
from torch import Tensor


def require_finite_logits(name: str, logits: Tensor) -> None:
    """Checks that a drafter's logits have no NaN, no +inf, and a finite number in every row.

    The engine counts the error as a fault of the requests that cause it. On a GPU the check waits for the device.

    Args:
        name: Name of the drafter, for the message.
        logits: Logits [N, V].

    Raises:
        ValueError: If a row has no distribution.
    """
    if not bool(torch.isfinite(logits.amax(1)).all()):
        raise ValueError(not_finite_message(name, logits.dtype))


def not_finite_message(name: str, dtype: torch.dtype) -> str:
    """Returns the message about logits without a distribution."""
    return (
        f"{name}: got logits that are not finite, in {str(dtype).removeprefix('torch.')}; expected finite numbers; "
        "load the model in bfloat16 or float32 if it overflows, or choose another draft model, head or drafter"
    )
