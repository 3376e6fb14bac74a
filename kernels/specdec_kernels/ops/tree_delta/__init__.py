"""tree_delta: the gated delta rule over packed trees."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from .._recurrence.cpu_inputs import dtypes_of, why_not_float32
from .reference import tree_delta as _reference


def _key(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, beta: Tensor, state: Tensor, *rest: Any, **more: Any
) -> Hashable:
    return dtypes_of(query, key, value, log_gate, beta, state)


def _why_not(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, beta: Tensor, state: Tensor, *rest: Any, **more: Any
) -> str | None:
    return why_not_float32(state, query, key, value, log_gate, beta)


tree_delta = Op(
    "tree_delta",
    _reference,
    [cpu_backend(lazy_import(__name__, "cpu_kernel:tree_delta"), _why_not, op="tree_delta")],
    key=_key,
)

__all__ = ["tree_delta"]
