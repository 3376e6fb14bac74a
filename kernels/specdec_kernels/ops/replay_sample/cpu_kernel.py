"""C++ backend of replay_sample."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .reference import check

_replay_sample = torch.ops.specdec.replay_sample.default


def replay_sample(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    seeds: Tensor,
    positions: Tensor,
    noise: Tensor | None = None,
) -> Tensor:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    try:
        return _replay_sample(logits, inv_t, cut, tie_id, seeds, positions, noise)
    except (RuntimeError, ValueError):
        check(logits, inv_t, cut, tie_id, seeds, positions, noise)  # names a remedy
        return _replay_sample(*argument_checks.make_contiguous(logits, inv_t, cut, tie_id, seeds, positions, noise))
