"""Backends that can serve a call of a recurrence, by its dtypes and the shape of its state.

Tests: tests/kernels/test_tree_delta.py, tests/kernels/test_tree_ssm.py, tests/kernels/test_state_commit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from .cpu_inputs import dtypes_of, why_not_float32
from .gpu_blocks import MOST_KEYS


class Selection:
    """What an operator with a state [R, H, K, V] says of its backends.

    Args:
        floats: Takes the arguments of a call. Returns the state, then its other floating-point inputs.
        why_not_state: Returns why the Triton kernels cannot serve a state, or None.
    """

    def __init__(self, floats: Callable[..., tuple[Any, ...]], why_not_state: Callable[[Tensor], str | None]) -> None:
        self._floats, self._why_not_state = floats, why_not_state

    def key(self, *args: Any, **named: Any) -> Hashable:
        """Returns the signature of a call: calls with equal ones have the same backend."""
        state, *others = self._floats(*args, **named)
        return *dtypes_of(state, *others), state.shape[2:3] > (MOST_KEYS,)

    def why_not_cpu(self, *args: Any, **named: Any) -> str | None:
        """Returns why the C++ kernels cannot serve a call, or None."""
        return why_not_float32(*self._floats(*args, **named))

    def why_not_triton(self, *args: Any, **named: Any) -> str | None:
        """Returns why the Triton kernels cannot serve a call, or None."""
        state, *others = self._floats(*args, **named)
        return why_not_float32(state, *others) or self._why_not_state(state)
