"""C++ backend of distribution_stats."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .reference import check, check_pivots

_distribution_stats = torch.ops.specdec.distribution_stats.default
_dist_masses = torch.ops.specdec.dist_masses.default


def distribution_stats(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    masses: bool = False,
    pivots: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    if pivots is not None:
        check_pivots(pivots, logits.shape[0])
    run = _dist_masses if masses else _distribution_stats
    try:
        return run(logits, temperature, top_k, top_p, min_p)
    except (RuntimeError, ValueError):
        check(logits, temperature, top_k, top_p, min_p)  # names a remedy
        return run(*argument_checks.make_contiguous(logits, temperature, top_k, top_p, min_p))
