"""Plain PyTorch definition of batch_invariant_linear_int8: a linear layer with int8 weights, row by row."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ...dispatch import argument_checks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
    """Raises ValueError if shapes or dtypes do not fit."""
    op = "batch_invariant_linear_int8"
    if not isinstance(x, Tensor) or x.ndim < 1 or x.dtype not in DTYPES:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{op}: x is {got}; expected float32, bfloat16 or float16 [..., K]; convert it with .to()")
    argument_checks.check_tensor(op, "weight", weight, torch.int8, "N", x.shape[-1])
    argument_checks.check_tensor(op, "scale", scale, torch.float32, weight.shape[0])
    if bias is not None:
        argument_checks.check_tensor(op, "bias", bias, x.dtype, weight.shape[0])


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight to int8 with one scale per output: the largest magnitude of an output becomes 127.

    Args:
        weight: [N, K], float, finite.

    Returns:
        (values, scale): int8 [N, K] and float32 [N]. values * scale is within scale / 2 of the weight.

    Raises:
        ValueError: If the weight is no float matrix, or not finite.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"quantize_int8: got {weight.dtype} {list(weight.shape)}; expected a float weight [N, K]")
    values, scales = [], []
    for part in weight.detach().split(4096):  # bounds the memory of float32 copies
        whole = part.float()
        largest = whole.abs().amax(1) if whole.shape[1] else whole.new_zeros(whole.shape[0])
        if not bool(largest.isfinite().all()):
            raise ValueError("quantize_int8: got a weight that is not finite; expected finite values")
        scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
        values.append((whole / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8))
        scales.append(scale)
    if not values:
        return weight.new_empty(weight.shape, dtype=torch.int8), weight.new_empty(0, dtype=torch.float32)
    return torch.cat(values), torch.cat(scales)


def batch_invariant_linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x @ (weight * scale[:, None]).T + bias; a row has the same bits whatever rows are beside it.

    Activations are not quantized. The int8 values are exact in every float format. Products are added in float32, and
    the scale multiplies their sum.

    Args:
        x: Inputs, [..., K], float32, bfloat16 or float16.
        weight: [N, K], int8. The C++ backend takes it with the inputs of an output side by side.
        scale: [N], float32.
        bias: [N] in the dtype of x, or None.

    Returns:
        [..., N], in the dtype of x.

    Raises:
        ValueError: If shapes or dtypes do not fit.
    """
    check(x, weight, scale, bias)
    rows, values = x.reshape(prod(x.shape[:-1]), x.shape[-1]).float(), weight.float()
    own = 0.0 if bias is None else bias.float()
    out = [(torch.nn.functional.linear(row[None], values) * scale + own).to(x.dtype) for row in rows]
    return torch.cat(out).view(*x.shape[:-1], weight.shape[0]) if out else x.new_empty(*x.shape[:-1], weight.shape[0])
