"""C++ backend of draft_sample."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .._proposals.verify_arguments import DistributionBatch
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
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    try:
        return _draft_sample(logits, inv_t, lse, cut, tie_id, seeds, root_positions, index, mass)
    except (RuntimeError, ValueError, TypeError):
        dists = DistributionBatch(logits, inv_t, lse, cut, tie_id)
        check(dists, seeds, root_positions, index, mass)  # names a remedy
        return _draft_sample(*argument_checks.make_contiguous(*dists, seeds, root_positions, index, mass))
