"""C++ backend of typical_verify."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .reference import bind, check

_typical_verify = torch.ops.specdec.typical_verify.default


def typical_verify(
    *args: Any, epsilon: float, delta: float, max_depth: int, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator, its arguments as `bind` takes them."""
    trees, randomness = bind(*args, **named)
    links = (trees.tokens, trees.offsets, trees.first_child, trees.next_sibling)
    others = (trees.score_only, randomness.seeds, randomness.root_positions)
    try:
        found: tuple[Tensor, Tensor, Tensor] = _typical_verify(
            *links, *trees.target, *others, epsilon, delta, max_depth
        )
    except (RuntimeError, ValueError, TypeError):
        check(trees, randomness, epsilon, delta, max_depth)  # names a remedy
        parts = argument_checks.make_contiguous(*links, *trees.target, *others)
        found = _typical_verify(*parts, epsilon, delta, max_depth)
    return found
