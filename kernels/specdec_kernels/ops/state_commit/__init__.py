"""state_commit and window_commit: recurrent states and convolution windows after accepted paths."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from .._recurrence.cpu_inputs import dtypes_of, why_not_float32
from .._recurrence.gpu_blocks import MOST_KEYS, why_not_registers
from .reference import check_state_data, check_window_data
from .reference import state_commit as _state_reference
from .reference import window_commit as _window_reference


def _floats(
    state: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    rows: Tensor,
    lengths: Tensor,
    path: Tensor,
    decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the floating-point arguments of a call."""
    return state, key, value, log_gate, decay


def _key(state: Tensor, *rest: Any, **more: Any) -> Hashable:
    return *dtypes_of(*_floats(state, *rest, **more)), state.shape[2:3] > (MOST_KEYS,)


def _why_not(*args: Any, **named: Any) -> str | None:
    return why_not_float32(*_floats(*args, **named))


def _why_not_triton(state: Tensor, *rest: Any, **more: Any) -> str | None:
    return _why_not(state, *rest, **more) or why_not_registers(state)


state_commit = Op(
    "state_commit",
    _state_reference,
    [
        triton_backend(lazy_import(__name__, "launch:state_commit"), _why_not_triton),
        cpu_backend(lazy_import(__name__, "cpu_kernel:state_commit"), _why_not, op="state_commit"),
    ],
    key=_key,
    check_data=check_state_data,
)
window_commit = Op(
    "window_commit",
    _window_reference,
    [
        triton_backend(lazy_import(__name__, "launch:window_commit")),
        cpu_backend(lazy_import(__name__, "cpu_kernel:window_commit"), op="window_commit"),
    ],
    check_data=check_window_data,
)

__all__ = ["state_commit", "window_commit"]
