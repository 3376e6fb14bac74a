"""tree_ssm: the selective state space recurrence over packed trees."""

from __future__ import annotations

from typing import Any

from ...dispatch.extension import cpu_backend
from ...dispatch.operator import Op, lazy_import
from ...triton_shared.triton_backend import triton_backend
from .._recurrence.gpu_blocks import why_not_program
from .._recurrence.selection import Selection
from .reference import SsmArguments, check_data
from .reference import tree_ssm as _reference


def _floats(*args: Any, **named: Any) -> tuple[Any, ...]:
    given = SsmArguments(*args, **named)
    return given.state, given.query, given.key, given.value, given.log_gate, given.decay


_selection = Selection(_floats, why_not_program)
tree_ssm = Op(
    "tree_ssm",
    _reference,
    [
        triton_backend(lazy_import(__name__, "launch:tree_ssm"), _selection.why_not_triton),
        triton_backend(lazy_import(__name__, "launch:tree_ssm_sequence"), _selection.why_not_triton, "triton_sequence"),
        cpu_backend(lazy_import(__name__, "cpu_kernel:tree_ssm"), _selection.why_not_cpu, op="tree_ssm"),
    ],
    key=_selection.key,
    check_data=check_data,
)

__all__ = ["tree_ssm"]
