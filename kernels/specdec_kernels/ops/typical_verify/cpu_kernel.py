"""C++ backend of typical_verify."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .._proposals.verify_arguments import Distribution
from .reference import bind, check

_typical_verify = torch.ops.specdec.typical_verify.default


def typical_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    target: Distribution,
    score_only: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    *,
    epsilon: float,
    delta: float,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    links = (tokens, offsets, first_child, next_sibling)
    try:
        found: tuple[Tensor, Tensor, Tensor] = _typical_verify(
            *links, *target, score_only, seeds, root_positions, epsilon, delta, max_depth
        )
    except (RuntimeError, ValueError, TypeError):
        check(*bind(*links, target, score_only, seeds, root_positions), epsilon, delta, max_depth)  # names a remedy
        parts = argument_checks.make_contiguous(*links, *target, score_only, seeds, root_positions)
        found = _typical_verify(*parts, epsilon, delta, max_depth)
    return found
