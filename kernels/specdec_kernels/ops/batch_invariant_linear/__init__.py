"""batch_invariant_linear: a linear layer whose rows have the same bits in every batch."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from .layout import stores_by_input
from .reference import batch_invariant_linear as _reference


def _key(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Hashable:
    return x.device.type, x.dtype, weight.dtype, 1 in weight.stride()


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    return None if 1 in weight.stride() else f"weight has strides {weight.stride()}; expected 1 in one of the two"


batch_invariant_linear = Op(
    "batch_invariant_linear",
    _reference,
    [cpu_backend(lazy_import(__name__, "cpu_kernel:batch_invariant_linear"), _why_not, op="batch_invariant_linear")],
    key=_key,
)

__all__ = ["batch_invariant_linear", "stores_by_input"]
