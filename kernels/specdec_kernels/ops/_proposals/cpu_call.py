"""Calls of the C++ operators on ordered proposals: all take the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...dispatch import argument_checks
from .batch import bind_trees


def verify_with(operator: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Makes a *_verify over a C++ operator; `check` raises with a remedy for arguments that the operator rejects."""

    def verify(*args: Any, max_depth: int, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        trees, randomness = bind_trees(*args, **named)
        try:
            return operator(*trees.flat(), *randomness.flat(), max_depth)
        except (RuntimeError, ValueError, TypeError):
            check(trees, randomness, max_depth=max_depth)
            return operator(*argument_checks.make_contiguous(*trees.flat(), *randomness.flat()), max_depth)

    return verify


def thresholds_with(operator: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Makes a *_thresholds over a C++ operator."""

    def thresholds(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        trees, _ = bind_trees(*args, **named)
        try:
            return operator(*trees.flat())
        except (RuntimeError, ValueError, TypeError):
            check(trees)
            return operator(*argument_checks.make_contiguous(*trees.flat()))

    return thresholds
