"""Training of heads that look ahead from one hidden state: Medusa-1 (Cai et al. 2024, section 2.2.1) and blockwise.

Tests: tests/train/heads/test_parallel.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_fast.train.heads.loss_mask import mean_where, told_apart
from specdec_fast.train.heads.target_states import TargetStates
from specdec_kernels.names import unknown_name

AUX_HIDDEN_STATE = "final_norm"
LABELS = ("text", "target")


class AheadTrainee(nn.Module):
    """The loss of heads over a frozen target: the sum over k of decay ** k times the cross-entropy of head k.

    heads: logits [heads, N, V] from states [N, hidden]; states: of the target; decay: 0.8 for Medusa, 1 for blockwise;
    labels: "text" is the token k + 2 places on, as published; "target" is the target's own distribution there, which
    says more per token.
    """

    def __init__(self, heads: nn.Module, states: TargetStates, decay: float = 0.8, labels: str = "text") -> None:
        super().__init__()
        if labels not in LABELS:
            raise ValueError(unknown_name("training labels", labels, LABELS))
        if not 0 < decay <= 1:
            raise ValueError(f"training decay: got {decay}; expected a number above 0, at most 1")
        self.heads: Any = heads
        self.states, self.decay, self.labels = states, decay, labels

    def _project(self, hidden: Tensor) -> Tensor:
        return self.states.lm_head(hidden.to(self.states.model.dtype)).float()

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [heads, B, L, V], states [B, L, hidden]) at every place of tokens [B, L]."""
        hidden = self.states(tokens)[AUX_HIDDEN_STATE].to(next(self.heads.parameters()).dtype)
        found = self.heads(hidden.flatten(0, 1), self._project)
        return found.unflatten(1, tokens.shape), hidden

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, measures) of tokens int64 [B, L], over those that count. Measures: how often each head's best token is
        the text's (`head_1`, ...), and `tokens_per_step`, what a chain of these best tokens would yield on this text.
        """
        tokens, counts = told_apart(tokens)
        logits, hidden = self.logits(tokens)
        ids: Tensor | None = self.heads.token_ids
        dist = self._project(hidden).softmax(-1) if self.labels == "target" else None
        count, length = logits.shape[0], tokens.shape[1]
        if length < count + 2:
            raise ValueError(
                f"training: got blocks of {length} tokens for {count} heads; expected at least {count + 2}"
            )
        loss = logits.new_zeros(())
        measures: dict[str, Tensor] = {}
        chain = torch.ones_like(tokens[:, : length - 1 - count], dtype=torch.bool)
        yielded = torch.ones((), device=tokens.device)
        for head in range(count):
            ahead = head + 2
            mine, text, kept = logits[head, :, : length - ahead], tokens[:, ahead:], counts[:, ahead:]
            scores = mine.float().log_softmax(-1)
            if ids is not None:
                whole = scores.new_full((*scores.shape[:-1], int(self.heads.vocab_size)), -30.0)
                scores = whole.index_copy(-1, ids, scores)  # a token that the head does not know costs it, and no more
            if dist is None:
                part = functional.nll_loss(scores.flatten(0, 1), text.flatten(), reduction="none").view_as(text)
            else:
                part = -(dist[:, ahead - 1 : length - 1, : scores.shape[-1]] * scores).sum(-1)
            loss = loss + self.decay**head * mean_where(part, kept)
            with torch.no_grad():
                hits = scores.argmax(-1) == text
                measures[f"head_{head + 1}"] = mean_where(hits, kept)
                chain = chain & hits[:, : chain.shape[1]]
                yielded = yielded + mean_where(chain, counts[:, 2 : 2 + chain.shape[1]])
        measures["tokens_per_step"] = yielded
        return loss, measures


@torch.no_grad()
def rank_rates(trainee: AheadTrainee, held: np.ndarray, length: int, width: int = 10) -> list[list[float]]:
    """rates[k][r]: how often the token k + 2 places on is rank r of head k, on held-out tokens [N] that count.

    What the authors build their trees from (section 2.3.3); `shapes.best_shape` takes it.
    """
    device = next(trainee.parameters()).device
    hits: Tensor | None = None
    places: Tensor | int = 0
    for start in range(0, len(held) - length, length):
        row = torch.from_numpy(held[start : start + length + 1].astype(np.int64))[None].to(device)
        tokens, counts = told_apart(row)
        logits, _ = trainee.logits(tokens)
        top = logits[:, 0].topk(min(width, logits.shape[-1]), dim=-1).indices
        if trainee.heads.token_ids is not None:
            top = trainee.heads.token_ids[top]
        count = logits.shape[0]
        end = tokens.shape[1] - 1 - count
        text = torch.stack([tokens[0, head + 2 : head + 2 + end] for head in range(count)])
        kept = torch.stack([counts[0, head + 2 : head + 2 + end] for head in range(count)])[..., None]
        found = ((top[:, :end] == text[..., None]) & kept).sum(1)
        hits = found if hits is None else hits + found
        places = places + kept.sum(1)
    assert hits is not None and isinstance(places, Tensor)
    return (hits / places.clamp(min=1)).tolist()
