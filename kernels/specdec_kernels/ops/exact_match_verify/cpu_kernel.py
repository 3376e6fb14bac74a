"""C++ backend of exact_match_verify."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .reference import check

_exact_match_verify = torch.ops.specdec.exact_match_verify.default


def exact_match_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    node_choice: Tensor,
    score_only: Tensor | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    try:
        return _exact_match_verify(tokens, offsets, first_child, next_sibling, node_choice, score_only, max_depth)
    except (RuntimeError, ValueError):
        check(tokens, offsets, first_child, next_sibling, node_choice, score_only, max_depth=max_depth)
        links = argument_checks.make_contiguous(tokens, offsets, first_child, next_sibling, node_choice, score_only)
        return _exact_match_verify(*links, max_depth)  # raises again for a path longer than max_depth
