"""tree_ssm: the selective state space recurrence over packed trees."""

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
from .reference import tree_ssm as _reference


def _key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    decay: Tensor | None = None,
    advance: bool = False,
) -> Hashable:
    return *dtypes_of(query, key, value, log_gate, state, decay), state.shape[2:3] > (MOST_KEYS,)


def _why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    decay: Tensor | None = None,
    advance: bool = False,
) -> str | None:
    return why_not_float32(state, query, key, value, log_gate, decay)


def _why_not_triton(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, state: Tensor, *rest: Any, **more: Any
) -> str | None:
    return _why_not(query, key, value, log_gate, state, *rest, **more) or why_not_program(state)


tree_ssm = Op(
    "tree_ssm",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:tree_ssm"), _why_not_triton),
        triton_backend(lazy_import(__name__, "launch:tree_ssm_sequence"), _why_not_triton, "triton_sequence"),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_ssm"), _why_not, op="tree_ssm"),
    ],
    key=_key,
    check_data=check_data,
)

__all__ = ["tree_ssm"]
