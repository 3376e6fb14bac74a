"""Medusa heads as FasterDecoding builds them, and what their checkpoints need to know of a target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, VOCAB, HEADS = 12, 29, 5


class Sizes:
    """What the checkpoints of Medusa heads need to know of a target. lm_head: its projection [V, hidden]."""

    def __init__(self, hidden_size: int = HIDDEN, vocab_size: int = VOCAB, lm_head: Tensor | None = None) -> None:
        self.hidden_size, self.vocab_size, self.num_embeddings = hidden_size, vocab_size, vocab_size + 3
        self.model = self
        self.weight = lm_head

    def get_output_embeddings(self) -> Any:
        return self


class Block(nn.Module):
    """A residual block as in all producers' code."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def producer(heads: int = HEADS, layers: int = 1, projection: bool = True) -> nn.ModuleList:
    """Returns heads as FasterDecoding builds them; their state dict has the keys of its files."""
    torch.manual_seed(0)
    tail = [nn.Linear(HIDDEN, VOCAB, bias=False)] if projection else []
    return nn.ModuleList(
        nn.Sequential(*[Block() for _ in range(layers)], *([nn.Linear(HIDDEN, VOCAB, bias=False)] if tail else []))
        for _ in range(heads)
    )


def states(count: int = 4) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(3))
