"""Blockwise parallel decoding: one feed-forward layer proposes the tokens of all places ahead (Stern et al. 2018).

Section 6 of the paper: a layer between the last hidden state and the projection, with a residual from its input to each
of its outputs, one output per place, all under the target's own projection. The paper's first place is the next token;
here the target itself says that one, so that the text is the target's. Modules only.
Tests: tests/drafters/test_blockwise.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional


class BlockwiseHeads(nn.Module):
    """hidden_size, vocab_size: the target's; num_heads: places ahead; inner_size: width of the layer per place.

    inner: hidden -> heads * inner_size; outer: heads * inner_size -> heads * hidden, zero at first.
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
        """Logits [heads, N, V] of states [N, hidden] as the target's last norm leaves them, by its projection.

        Raises ValueError without lm_head.
        """
        if lm_head is None:
            raise ValueError("blockwise heads: got no projection; expected lm_head, the target's own")
        ahead = self.outer(functional.relu(self.inner(states))).unflatten(-1, (self.num_heads, self.hidden_size))
        return lm_head((states[:, None] + ahead).transpose(0, 1))
