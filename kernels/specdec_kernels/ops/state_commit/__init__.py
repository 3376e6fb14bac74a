"""state_commit and window_commit: recurrent states and convolution windows after accepted paths."""

from __future__ import annotations

from torch import Tensor

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from .._recurrence.gpu_blocks import why_not_registers
from .._recurrence.selection import Selection
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
    return state, key, value, log_gate, decay


_selection = Selection(_floats, why_not_registers)
state_commit = Op(
    "state_commit",
    _state_reference,
    [
        triton_backend(lazy_import(__name__, "launch:state_commit"), _selection.why_not_triton),
        cpu_backend(lazy_import(__name__, "cpu_kernel:state_commit"), _selection.why_not_cpu, op="state_commit"),
    ],
    key=_selection.key,
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
