"""C++ backend of replay_verify."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .reference import check

_replay_verify = torch.ops.specdec.replay_verify.default


def replay_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    score_only: Tensor | None,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
) -> tuple[Tensor, ...]:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    parts = (tokens, offsets, first_child, next_sibling, score_only, logits, *sampling, seeds, root_positions)
    try:
        return _replay_verify(*parts, max_depth)
    except (RuntimeError, ValueError, TypeError):
        check(
            tokens, offsets, first_child, next_sibling, score_only, logits, sampling, seeds, root_positions,
            max_depth=max_depth,
        )  # fmt: skip  # names a remedy
        return _replay_verify(*argument_checks.make_contiguous(*parts), max_depth)
