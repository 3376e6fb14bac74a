"""C++ backend of draw_sample."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from .reference import check

_draw_sample = torch.ops.specdec.draw_sample.default


def draw_sample(
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
        return _draw_sample(logits, inv_t, lse, cut, tie_id, seeds, root_positions, index, mass)
    except (RuntimeError, ValueError, TypeError):
        check(logits, inv_t, lse, cut, tie_id, seeds, root_positions, index, mass)  # raises with a remedy
        return _draw_sample(*expect.contiguous(logits, inv_t, lse, cut, tie_id, seeds, root_positions, index, mass))
