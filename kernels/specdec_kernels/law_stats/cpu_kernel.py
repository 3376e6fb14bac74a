"""C++ backend of law_stats."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from .reference import check

_law_stats = torch.ops.specdec.law_stats.default


def law_stats(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    try:
        return _law_stats(logits, temperature, top_k, top_p, min_p)
    except (RuntimeError, ValueError):
        check(logits, temperature, top_k, top_p, min_p)  # raises with a remedy
        return _law_stats(*expect.contiguous(logits, temperature, top_k, top_p, min_p))
