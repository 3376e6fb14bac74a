"""batch_invariant_linear_int8: batch_invariant_linear with a weight of int8 values and one scale per output."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from .reference import batch_invariant_linear_int8 as _reference
from .reference import quantize_int8


def _key(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Hashable:
    return x.device.type, x.dtype, weight.dtype, weight.stride(-1)


def _why_not(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> str | None:
    return None if weight.stride(-1) == 1 else f"weight has strides {weight.stride()}; expected 1 in the second"


batch_invariant_linear_int8 = Op(
    "batch_invariant_linear_int8",
    _reference,
    [
        cpu_backend(
            lazy_import(__name__, "cpu_kernel:batch_invariant_linear_int8"),
            _why_not,
            op="batch_invariant_linear_int8",
        )
    ],
    key=_key,
)

__all__ = ["batch_invariant_linear_int8", "quantize_int8"]
