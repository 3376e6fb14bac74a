"""tree_delta: the gated delta rule over packed trees."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from .._recurrence.cpu_inputs import dtypes_of, why_not_float32
from .._recurrence.gpu_blocks import MOST_KEYS, why_not_program
from .reference import check_data
from .reference import tree_delta as _reference


def _key(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, beta: Tensor, state: Tensor, *rest: Any, **more: Any
) -> Hashable:
    return *dtypes_of(query, key, value, log_gate, beta, state), state.shape[2:3] > (MOST_KEYS,)


def _why_not(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, beta: Tensor, state: Tensor, *rest: Any, **more: Any
) -> str | None:
    return why_not_float32(state, query, key, value, log_gate, beta)


def _why_not_triton(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, beta: Tensor, state: Tensor, *rest: Any, **more: Any
) -> str | None:
    return why_not_float32(state, query, key, value, log_gate, beta) or why_not_program(state)


tree_delta = Op(
    "tree_delta",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:tree_delta"), _why_not_triton),
        triton_backend(lazy_import(__name__, "launch:tree_delta_sequence"), _why_not_triton, "triton_sequence"),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_delta"), _why_not, op="tree_delta"),
    ],
    key=_key,
    check_data=check_data,
)

__all__ = ["tree_delta"]
