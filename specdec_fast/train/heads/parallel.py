"""Trainees for parallel heads: Medusa-1 and blockwise parallel decoding.

Tests: tests/train/heads/test_parallel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_fast.train.heads.loss_mask import masked_mean, split_loss_mask
from specdec_fast.train.heads.target_states import TargetStates
from specdec_fast.train.token_batches import cut_block
from specdec_kernels.unknown_names import unknown_name

AUX_HIDDEN_STATE = "final_norm"
LABELS = ("text", "target")


class ParallelHeadsTrainee(nn.Module):
    """Computes the loss of parallel heads over a frozen target.

    The loss is the sum over k of decay ** k times the cross-entropy of head k.

    Args:
        heads: A module that maps hidden states [N, hidden] to logits [heads, N, V].
        states: Hidden states of the target.
        decay: Weight of a head relative to the previous one; 0.8 for Medusa, 1 for blockwise.
        labels: "text" uses the token k + 2 positions ahead, as published; "target" uses the target's distribution
            there, which carries more information per token.

    Raises:
        ValueError: If `labels` or `decay` is invalid.

    Source:
        Cai et al. 2024, section 2.2.1.
    """

    def __init__(self, heads: nn.Module, states: TargetStates, decay: float = 0.8, labels: str = "text") -> None:
        super().__init__()
        if labels not in LABELS:
            raise ValueError(unknown_name("training labels", labels, LABELS))
        if not 0 < decay <= 1:
            raise ValueError(f"training decay: got {decay}; expected a number above 0, at most 1")
        self.heads: Any = heads
        self.states, self.decay, self.labels = states, decay, labels

    @property
    def logits_per_token(self) -> int:
        """Logits that a step keeps for every token."""
        ids = self.heads.token_ids
        return int(self.heads.num_heads) * int(self.heads.vocab_size if ids is None else len(ids))

    def _project(self, hidden: Tensor) -> Tensor:
        return self.states.lm_head(hidden.to(self.states.model.dtype)).float()

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the heads' logits at every position.

        Args:
            tokens: Token ids, int64 [B, L].

        Returns:
            Logits [heads, B, L, V] and hidden states [B, L, hidden].
        """
        hidden = self.states(tokens)[AUX_HIDDEN_STATE].to(next(self.heads.parameters()).dtype)
        found = self.heads(hidden.flatten(0, 1), self._project)
        return found.unflatten(1, tokens.shape), hidden

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes loss and measurements over tokens with loss.

        Args:
            tokens: Stored tokens, int64 [B, L]; ~token marks one without loss.

        Returns:
            The scalar loss, and measurements by name: `head_1`, ... is the share of positions where the head's best
            token is the text's; `tokens_per_step` is the yield of a chain of these tokens on this text.

        Raises:
            ValueError: If the blocks are too short for the number of heads.
        """
        tokens, counts = split_loss_mask(tokens)
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
                scores = whole.index_copy(-1, ids, scores)  # a token outside the head's vocabulary costs a bounded loss
            if dist is None:
                part = functional.nll_loss(scores.flatten(0, 1), text.flatten(), reduction="none").view_as(text)
            else:
                part = -(dist[:, ahead - 1 : length - 1, : scores.shape[-1]] * scores).sum(-1)
            loss = loss + self.decay**head * masked_mean(part, kept)
            with torch.no_grad():
                hits = scores.argmax(-1) == text
                measures[f"head_{head + 1}"] = masked_mean(hits, kept)
                chain = chain & hits[:, : chain.shape[1]]
                yielded = yielded + masked_mean(chain, counts[:, 2 : 2 + chain.shape[1]])
        measures["tokens_per_step"] = yielded
        return loss, measures


@torch.no_grad()
def measure_rank_rates(
    trainee: ParallelHeadsTrainee, held: np.ndarray, length: int, width: int = 10, beginning: Sequence[int] = ()
) -> list[list[float]]:
    """Measures how often the token k + 2 positions ahead has rank r under head k.

    Args:
        trainee: Trained heads.
        held: Held-out tokens, int32 [N].
        length: Tokens per block.
        width: Number of ranks.
        beginning: Special tokens with which every block begins; see `token_batches.cut_block`.

    Returns:
        Rates [heads][ranks], the input of `topology.best_shape`.

    Source:
        Cai et al. 2024, section 2.3.3.
    """
    device = next(trainee.parameters()).device
    hits: Tensor | None = None
    places: Tensor | int = 0
    for start in range(0, len(held) - length, length):
        row = torch.from_numpy(cut_block(held, start, length, beginning))[None].to(device)
        tokens, counts = split_loss_mask(row)
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
