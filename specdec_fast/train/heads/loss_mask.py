"""Which tokens of a training text count: those of answers do, those of the prompts before them do not.

A token that does not count is stored as ~token, below zero. Heads read it as any other and need not foresee it.
Tests: tests/train/heads/test_parallel.py, tests/train/heads/test_recurrent.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def told_apart(row: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, whether each of them counts, bool) of a stored text, both of its shape."""
    return torch.where(row < 0, ~row, row), row >= 0


def mean_where(values: Tensor, counts: Tensor) -> Tensor:
    """The mean of those values that count; 0 where none does."""
    return (values * counts).sum() / counts.sum().clamp(min=1)
