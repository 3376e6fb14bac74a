"""Inputs of kernels of recurrent layers: dtypes that they take, and contiguous copies."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def why_not_float32(kept: Tensor, *inputs: Tensor | None) -> str | None:
    """Returns why the kernels cannot compute with these dtypes, or None.

    Args:
        kept: The state.
        *inputs: All other floating-point inputs.

    Returns:
        The reason: the kernels compute in float32, so float64 would lose digits.
    """
    if kept.dtype != torch.float32:
        return f"state is {kept.dtype}; this kernel computes in float32"
    return why_not_narrow(*inputs)


def why_not_narrow(*inputs: Tensor | None) -> str | None:
    """Returns which dtype is not float32, bfloat16 or float16, or None."""
    for each in inputs:
        if each is not None and each.dtype not in _NARROW:
            return f"an input is {each.dtype}; this kernel computes in float32"
    return None


def dtypes_of(first: Tensor, *others: Tensor | None) -> tuple[Hashable, ...]:
    """Returns the signature of a call: the device of the first tensor, since GPUs may be unlike, and all dtypes."""
    return first.is_cpu or first.device, first.dtype, *[None if each is None else each.dtype for each in others]


def in_one_piece(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Returns the tensors in contiguous memory, copied where they are not. None stays None."""
    return tuple(None if each is None else each.contiguous() for each in tensors)
