"""tree_conv: causal convolution along the ancestors of packed nodes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from .._recurrence.cpu_inputs import dtypes_of, why_not_narrow
from .reference import check_data
from .reference import tree_conv as _reference


def _key(inputs: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, *rest: Any, **more: Any) -> Hashable:
    return dtypes_of(inputs, weight, bias, window)


def _why_not(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, *rest: Any, **more: Any
) -> str | None:
    if inputs.dtype != window.dtype:
        return f"inputs is {inputs.dtype} and window {window.dtype}; this kernel needs one dtype"
    return why_not_narrow(inputs, weight, bias)


tree_conv = Op(
    "tree_conv",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:tree_conv"), _why_not),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_conv"), _why_not, op="tree_conv"),
    ],
    key=_key,
    check_data=check_data,
)

__all__ = ["tree_conv"]
