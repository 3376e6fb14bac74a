"""Drafting with a recurrent head from every position of a text at once, for training and measurements.

Tests: tests/train/heads/test_recurrent.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def unroll(head: Any, embedded: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Computes drafts of `steps` positions from all positions of a text.

    Position t of step j is the j-th position drafted behind the true positions 0..t. It attends to these, and to itself
    in the steps before. The last j positions of step j lie beyond the text and have no meaning. The head attends by
    transformers' own attention ("sdpa").

    Args:
        head: A recurrent head.
        embedded: Embeddings of the tokens behind the features, [B, T, hidden].
        features: True features, [B, T, hidden].
        steps: Positions to draft.

    Returns:
        Predicted features [B, T, hidden] per step.

    Source:
        Li et al. 2025 (EAGLE-3), section 3.2, training-time test.
    """
    from transformers import DynamicCache

    count = embedded.shape[1]
    cache = DynamicCache()
    device = embedded.device
    mask = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    itself = torch.eye(count, dtype=torch.bool, device=device)
    places = torch.arange(count, device=device)
    found: list[Tensor] = []
    for step in range(steps):
        features = head(
            embedded,
            features,
            (places + step)[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
        )
        found.append(features)
        embedded = functional.pad(embedded[:, 1:], (0, 0, 0, 1))
        mask = torch.cat([mask, itself], dim=1)
    return found
