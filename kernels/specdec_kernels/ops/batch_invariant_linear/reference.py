"""Plain PyTorch definition of batch_invariant_linear: a linear layer row by row."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ...dispatch import argument_checks


def check(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Raises ValueError if shapes or dtypes do not fit."""
    if not isinstance(x, Tensor) or x.ndim < 1 or x.dtype not in argument_checks.FLOAT_DTYPES:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"batch_invariant_linear: x is {got}; expected a float tensor [..., K]; convert it with .to()")
    argument_checks.check_tensor("batch_invariant_linear", "weight", weight, x.dtype, "N", x.shape[-1])
    if bias is not None:
        argument_checks.check_tensor("batch_invariant_linear", "bias", bias, x.dtype, weight.shape[0])


def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x @ weight.T + bias so that a row of the result has the same bits whatever rows are beside it.

    Matrix libraries add in another order for another number of rows, so the last bits of a token's logits depend on the
    number of tokens that are scored together. Here the order of a sum follows from K and the strides of `weight` alone.
    Products of half formats are added in float32 and rounded once.

    Args:
        x: Inputs, [..., K], float32, bfloat16, float16 or float64.
        weight: [N, K] of the same dtype in any layout. The C++ backend takes stride 1 in one of its two dimensions, and
            is fastest for few rows if that is the first (stored by input).
        bias: [N] of the same dtype, or None.

    Returns:
        [..., N].

    Raises:
        ValueError: If shapes or dtypes do not fit.
    """
    check(x, weight, bias)
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    out = [torch.nn.functional.linear(row[None], weight, bias) for row in rows]
    return torch.cat(out).view(*x.shape[:-1], weight.shape[0]) if out else x.new_empty(*x.shape[:-1], weight.shape[0])
