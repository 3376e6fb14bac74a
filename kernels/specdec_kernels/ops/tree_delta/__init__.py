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
from .reference import DeltaArguments, check_data
from .reference import tree_delta as _reference


def _floats(given: DeltaArguments) -> tuple[Tensor | None, ...]:
    """Returns the floating-point inputs of a call."""
    return given.query, given.key, given.value, given.log_gate, given.beta


def _key(*args: Any, **named: Any) -> Hashable:
    given = DeltaArguments(*args, **named)
    return *dtypes_of(given.state, *_floats(given)), given.state.shape[2:3] > (MOST_KEYS,)


def _why_not(*args: Any, **named: Any) -> str | None:
    given = DeltaArguments(*args, **named)
    return why_not_float32(given.state, *_floats(given))


def _why_not_triton(*args: Any, **named: Any) -> str | None:
    return _why_not(*args, **named) or why_not_program(DeltaArguments(*args, **named).state)


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
