"""C++ backend of law_stats."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from .reference import check, check_pivots

_law_stats = torch.ops.specdec.law_stats.default
_law_masses = torch.ops.specdec.law_masses.default


def law_stats(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    masses: bool = False,
    pivots: Tensor | None = None,
) -> tuple[Tensor, ...]:
    if pivots is not None:
        check_pivots(pivots, logits.shape[0])
    run = _law_masses if masses else _law_stats
    try:
        return run(logits, temperature, top_k, top_p, min_p)
    except (RuntimeError, ValueError):
        check(logits, temperature, top_k, top_p, min_p)  # raises with a remedy
        return run(*expect.contiguous(logits, temperature, top_k, top_p, min_p))
