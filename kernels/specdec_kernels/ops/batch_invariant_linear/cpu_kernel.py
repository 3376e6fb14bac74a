"""C++ backend of batch_invariant_linear: register tiles of rows and outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import check

_batch_invariant_linear = torch.ops.specdec.batch_invariant_linear.default


def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    if torch.compiler.is_compiling():  # a graph catches no exceptions
        return _call_traced(x, weight, bias)
    try:
        out: Tensor = _batch_invariant_linear(x, weight, bias)
    except (RuntimeError, ValueError):
        check(x, weight, bias)  # raises with a message that says what to do
        out = _batch_invariant_linear(x.contiguous(), weight, None if bias is None else bias.contiguous())
    return out


def _call_traced(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    plain = weight if 1 in weight.stride() else weight.contiguous()
    out: Tensor = _batch_invariant_linear(x.contiguous(), plain, None if bias is None else bias.contiguous())
    return out
