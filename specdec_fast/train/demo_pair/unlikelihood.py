"""Unlikelihood training: a small model falls into loops under greedy decoding unless it is taught not to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def repeated(tokens: Sequence[int], start: int, n: int = 4) -> list[bool]:
    """For every token: does it complete an n-gram that already ended earlier, counting from ``start`` only?"""
    seen: set[tuple[int, ...]] = set()
    marks = [False] * len(tokens)
    for end in range(start + n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        marks[end - 1] = gram in seen
        seen.add(gram)
    return marks


def repetition_mask(rows: Tensor, start: int, n: int = 4) -> Tensor:
    """`repeated` for every row of ``rows [B, T]``, bool [B, T]."""
    return torch.tensor([repeated(row, start, n) for row in rows.tolist()])


def unlikelihood(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Mean of -log(1 - p(target)) over the masked positions; logits [B, T, V], targets and mask [B, T].

    Sequence-level unlikelihood: Welleck et al. 2020, "Neural text generation with unlikelihood training"
    (arXiv:1908.04319), section 4.2.
    """
    if not bool(mask.any()):
        return logits.sum() * 0.0
    chosen = logits[mask].float().log_softmax(-1).gather(-1, targets[mask][:, None]).squeeze(-1)
    # log(1 - p) without cancellation, kept finite where p rounds to 1
    return -torch.log(-torch.expm1(chosen.clamp(max=-1e-6))).mean()
