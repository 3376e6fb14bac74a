"""Unlikelihood loss against repetition, since small models loop under greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def repeated(tokens: Sequence[int], start: int, n: int = 4) -> list[bool]:
    """Returns for every token whether it completes an n-gram that occurred before, from `start` on."""
    seen: set[tuple[int, ...]] = set()
    marks = [False] * len(tokens)
    for end in range(start + n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        marks[end - 1] = gram in seen
        seen.add(gram)
    return marks


def repetition_mask(rows: Tensor, start: int, n: int = 4) -> Tensor:
    """Returns `repeated` of every row of an int64 [B, T], bool [B, T]."""
    return torch.tensor([repeated(row, start, n) for row in rows.tolist()])


def unlikelihood(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Computes the mean of -log(1 - p(target)) over masked positions.

    Args:
        logits: [B, T, V].
        targets: Token ids, int64 [B, T].
        mask: Positions to include, bool [B, T].

    Returns:
        The scalar loss, 0 if no position is included.

    Source:
        Welleck et al. 2020, "Neural text generation with unlikelihood training" (arXiv:1908.04319), section 4.2.
    """
    if not bool(mask.any()):
        return logits.sum() * 0.0
    log_p = logits[mask].float().log_softmax(-1).gather(-1, targets[mask][:, None]).squeeze(-1)
    # log(1 - p) without cancellation, kept finite where p rounds to 1
    return -torch.log(-torch.expm1(log_p.clamp(max=-1e-6))).mean()
