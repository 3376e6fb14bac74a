"""batch_invariant_linear: a linear layer whose rows have the same bits in every batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op
from .reference import batch_invariant_linear as _reference


def _load_cpu() -> Callable[..., Any]:
    from .cpu_kernel import batch_invariant_linear

    return batch_invariant_linear


def _key(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Hashable:
    return x.device.type, x.dtype, weight.dtype, 1 in weight.stride()


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    return None if 1 in weight.stride() else f"weight has strides {weight.stride()}; expected 1 in one of the two"


batch_invariant_linear = Op(
    "batch_invariant_linear", _reference, [cpu_backend(_load_cpu, _why_not, op="batch_invariant_linear")], key=_key
)

__all__ = ["batch_invariant_linear"]
