"""state_commit and window_commit: recurrent states and convolution windows after accepted paths."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from .._recurrence.cpu_inputs import dtypes_of, why_not_float32
from .reference import state_commit as _state_reference
from .reference import window_commit as _window_reference


def _key(
    state: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    rows: Tensor,
    lengths: Tensor,
    path: Tensor,
    decay: Tensor | None = None,
) -> Hashable:
    return dtypes_of(state, key, value, log_gate, decay)


def _why_not(
    state: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    rows: Tensor,
    lengths: Tensor,
    path: Tensor,
    decay: Tensor | None = None,
) -> str | None:
    return why_not_float32(state, key, value, log_gate, decay)


state_commit = Op(
    "state_commit",
    _state_reference,
    [cpu_backend(lazy_import(__name__, "cpu_kernel:state_commit"), _why_not, op="state_commit")],
    key=_key,
)
window_commit = Op(
    "window_commit",
    _window_reference,
    [cpu_backend(lazy_import(__name__, "cpu_kernel:window_commit"), op="window_commit")],
)

__all__ = ["state_commit", "window_commit"]
