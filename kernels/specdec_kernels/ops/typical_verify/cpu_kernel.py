"""C++ backend of typical_verify."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .._proposals.reference import Distribution
from .reference import check

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
    tree = (tokens, offsets, first_child, next_sibling)
    parts = (*tree, *target, score_only, seeds, root_positions)
    try:
        found: tuple[Tensor, Tensor, Tensor] = _typical_verify(*parts, epsilon, delta, max_depth)
    except (RuntimeError, ValueError, TypeError):
        check(*tree, target, score_only, seeds, root_positions, epsilon, delta, max_depth)  # raises with a remedy
        found = _typical_verify(*argument_checks.make_contiguous(*parts), epsilon, delta, max_depth)
    return found
