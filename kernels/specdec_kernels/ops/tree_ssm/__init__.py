"""tree_ssm: the selective state space recurrence over packed trees."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from .._recurrence.cpu_inputs import dtypes_of, why_not_float32
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
    return dtypes_of(query, key, value, log_gate, state, decay)


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


tree_ssm = Op(
    "tree_ssm",
    _reference,
    [cpu_backend(lazy_import(__name__, "cpu_kernel:tree_ssm"), _why_not, op="tree_ssm")],
    key=_key,
)

__all__ = ["tree_ssm"]
