"""C++ backend of batch_invariant_linear_int8: weights become floats in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import check

_batch_invariant_linear_int8 = torch.ops.specdec.batch_invariant_linear_int8.default


def batch_invariant_linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    if torch.compiler.is_compiling():  # a graph catches no exceptions
        return _call_contiguous(x, weight, scale, bias)
    try:
        out: Tensor = _batch_invariant_linear_int8(x, weight, scale, bias)
    except (RuntimeError, ValueError):
        check(x, weight, scale, bias)  # raises with a message that says what to do
        out = _call_contiguous(x, weight, scale, bias)
    return out


def _call_contiguous(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    whole = weight if weight.stride(-1) == 1 else weight.contiguous()
    own = None if bias is None else bias.contiguous()
    out: Tensor = _batch_invariant_linear_int8(x.contiguous(), whole, scale.contiguous(), own)
    return out
