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
from .reference import SsmArguments, check_data
from .reference import tree_ssm as _reference


def _floats(given: SsmArguments) -> tuple[Tensor | None, ...]:
    """Returns the floating-point inputs of a call."""
    return given.query, given.key, given.value, given.log_gate, given.decay


def _key(*args: Any, **named: Any) -> Hashable:
    given = SsmArguments(*args, **named)
    return *dtypes_of(given.state, *_floats(given)), given.state.shape[2:3] > (MOST_KEYS,)


def _why_not(*args: Any, **named: Any) -> str | None:
    given = SsmArguments(*args, **named)
    return why_not_float32(given.state, *_floats(given))


def _why_not_triton(*args: Any, **named: Any) -> str | None:
    return _why_not(*args, **named) or why_not_program(SsmArguments(*args, **named).state)


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
