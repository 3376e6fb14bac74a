"""Drafting of a recurrent head from every place of a text at once, as training and measuring want it.

Li et al. 2025 (EAGLE-3), section 3.2, training-time test. Tests: tests/train/heads/test_recurrent.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def unroll(head: Any, embedded: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """What drafting `steps` places ahead computes, for all places at once: predicted features [B, T, hidden] per step.

    embedded: [B, T, hidden], of the tokens behind the features; features: [B, T, hidden], true ones. Place t of step j
    is the j-th place drafted behind the true places 0..t: it attends to these, and to itself in the steps before. At
    the end of the text, where its token would lie beyond, it means nothing (the last j places). The head attends by
    transformers' own attention ("sdpa").
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
