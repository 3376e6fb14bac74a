"""C++ backend of draft_sample."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .reference import check

_draft_sample = torch.ops.specdec.draft_sample.default


def draft_sample(
    logits: Tensor,
    inv_t: Tensor,
    lse: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    seeds: Tensor,
    root_positions: Tensor,
    index: Tensor,
    *,
    mass: Tensor | None = None,
) -> Tensor:
    try:
        return _draft_sample(logits, inv_t, lse, cut, tie_id, seeds, root_positions, index, mass)
    except (RuntimeError, ValueError, TypeError):
        check(logits, inv_t, lse, cut, tie_id, seeds, root_positions, index, mass)  # raises with a remedy
        return _draft_sample(
            *argument_checks.make_contiguous(logits, inv_t, lse, cut, tie_id, seeds, root_positions, index, mass)
        )
