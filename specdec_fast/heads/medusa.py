"""Medusa heads: residual blocks on the target's last hidden state, one stack per position ahead.

Head k (from 0) reads the hidden state at position t, from which the target predicts the token at t + 1, and predicts
the token at t + 2 + k. Tests: tests/heads/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class MedusaHeads(nn.Module):
    """All heads of a target, stacked, so a step costs one batched product per layer.

    Args:
        hidden_size: Width of the target's hidden states.
        vocab_size: Vocabulary of the target.
        num_heads: Positions ahead.
        num_layers: Residual blocks per head.
        bias: Whether blocks have a bias.
        own_lm_head: Every head has a projection; otherwise the target's is used.
        shared_lm_head: All heads have one projection of their own.
        token_ids: Number of tokens that the projections know. None: all.

    Attributes:
        weight: [layers, heads, hidden, hidden].
        bias: [layers, heads, hidden], or None.
        lm_head: [heads, V, hidden], [1, V, hidden] if the heads share it, or None.
        token_ids: Target id of each row of `lm_head`, int64 [V]. None: all ids.

    Raises:
        ValueError: If a size is below 1, or for a reduced vocabulary without own projections.

    Source:
        Cai et al. 2024 (Medusa), section 2.1.1.
    """

    token_ids: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        *,
        num_layers: int = 1,
        bias: bool = True,
        own_lm_head: bool = True,
        shared_lm_head: bool = False,
        token_ids: int | None = None,
    ) -> None:
        super().__init__()
        if min(hidden_size, vocab_size, num_heads) < 1 or num_layers < 0:
            raise ValueError(
                f"medusa heads: got hidden_size {hidden_size}, vocab_size {vocab_size}, {num_heads} heads of "
                f"{num_layers} layers; expected at least 1 of each (0 layers leave the projections alone)"
            )
        if token_ids is not None and not own_lm_head:
            raise ValueError("medusa heads: got a reduced vocabulary without own projections; expected own_lm_head")
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers = num_heads, num_layers
        self.weight = nn.Parameter(torch.zeros(num_layers, num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_layers, num_heads, hidden_size)) if bias else None
        rows = vocab_size if token_ids is None else token_ids
        projections = 1 if shared_lm_head else num_heads
        self.lm_head = nn.Parameter(torch.zeros(projections, rows, hidden_size)) if own_lm_head else None
        ids = None if token_ids is None else torch.zeros(token_ids, dtype=torch.int64)
        self.register_buffer("token_ids", ids)

    def start_from(self, lm_head: Tensor) -> None:
        """Initialises as published: blocks without effect, and the target's projection [V, hidden] for every head."""
        with torch.no_grad():
            self.weight.zero_()
            if self.bias is not None:
                self.bias.zero_()
            if self.lm_head is not None:
                self.lm_head.copy_(lm_head[: self.lm_head.shape[1]].expand_as(self.lm_head))

    def hidden(self, states: Tensor) -> Tensor:
        """Returns the states that are projected to the vocabulary, [heads, N, hidden], from states [N, hidden]."""
        x = states.expand(self.num_heads, *states.shape)
        for layer in range(self.num_layers):
            weight = self.weight[layer].transpose(1, 2)
            if self.bias is None:
                x = x + functional.silu(torch.bmm(x, weight))
            else:
                x = x + functional.silu(torch.baddbmm(self.bias[layer][:, None], x, weight))
        return x

    def forward(self, states: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Computes the logits of all heads.

        Args:
            states: Hidden states "final_norm" of the target, [N, hidden].
            lm_head: The target's projection, for heads without their own.

        Returns:
            Logits [heads, N, V]. V is the head's own vocabulary if it is reduced.

        Raises:
            ValueError: If a projection is required and missing.
        """
        x = self.hidden(states)
        if self.lm_head is not None and self.lm_head.shape[0] < self.num_heads:
            return functional.linear(x, self.lm_head[0])
        if self.lm_head is not None:
            return torch.bmm(x, self.lm_head.transpose(1, 2))
        if lm_head is None:
            raise ValueError("medusa heads: got heads without projections; expected lm_head, the target's own")
        return lm_head(x)
