"""Heads of blockwise parallel decoding: one feed-forward layer predicts the tokens of all positions ahead.

The layer stands between the last hidden state and the projection, with a residual from its input to each output. There
is one output per position, all under the target's own projection. The paper's first position is the next token; here
the target itself predicts it, so the text is the target's. Tests: tests/drafters/test_blockwise.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional


class BlockwiseHeads(nn.Module):
    """Heads of blockwise parallel decoding.

    Args:
        hidden_size: Width of the target's hidden states.
        vocab_size: Vocabulary of the target.
        num_heads: Positions ahead.
        inner_size: Width of the layer per position. None: `hidden_size`.

    Attributes:
        inner: Linear layer hidden -> heads * inner_size.
        outer: Linear layer heads * inner_size -> heads * hidden, initialised with zeros.

    Raises:
        ValueError: If a size is below 1.

    Source:
        Stern et al. 2018, section 6.
    """

    token_ids: Tensor | None = None

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int, inner_size: int | None = None) -> None:
        super().__init__()
        self.inner_size = hidden_size if inner_size is None else inner_size
        if min(hidden_size, vocab_size, num_heads, self.inner_size) < 1:
            raise ValueError(
                f"blockwise heads: got hidden_size {hidden_size}, vocab_size {vocab_size}, {num_heads} heads of inner "
                f"size {self.inner_size}; expected at least 1 of each"
            )
        self.hidden_size, self.vocab_size, self.num_heads = hidden_size, vocab_size, num_heads
        self.inner = nn.Linear(hidden_size, num_heads * self.inner_size)
        self.outer = nn.Linear(num_heads * self.inner_size, num_heads * hidden_size)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, states: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Computes the logits of all heads.

        Args:
            states: Hidden states "final_norm" of the target, [N, hidden].
            lm_head: The target's projection.

        Returns:
            Logits [heads, N, V].

        Raises:
            ValueError: If a projection is required and missing.
        """
        if lm_head is None:
            raise ValueError("blockwise heads: got no projection; expected lm_head, the target's own")
        ahead = self.outer(functional.relu(self.inner(states))).unflatten(-1, (self.num_heads, self.hidden_size))
        return lm_head((states[:, None] + ahead).transpose(0, 1))
