"""The loss mask of training tokens: answers have a loss, the prompts before them have none.

A token without loss is stored as ~token, below zero. Heads read it like any other token, but are not
trained to predict it. Tests: tests/train/heads/test_parallel.py, tests/train/heads/test_recurrent.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_loss_mask(row: Tensor) -> tuple[Tensor, Tensor]:
    """Splits stored tokens into ids and a loss mask.

    Args:
        row: Stored tokens, any shape; ~token marks one without loss.

    Returns:
        Token ids, and a bool mask that is true for tokens with loss; both have the shape of `row`.
    """
    return torch.where(row < 0, ~row, row), row >= 0


def masked_mean(values: Tensor, counts: Tensor) -> Tensor:
    """Returns the mean of `values` where `counts` is true; 0 if it is true nowhere."""
    return (values * counts).sum() / counts.sum().clamp(min=1)
