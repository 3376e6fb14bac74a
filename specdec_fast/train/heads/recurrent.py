"""Trainees for EAGLE heads: next state and next token (EAGLE-1), and unrolled steps (EAGLE-3).

The training loop is specdec_fast/train/heads/trainer.py. Source: Li et al. 2024 (EAGLE), section 4.1.3; Li et al. 2025
(EAGLE-3), section 3.2, training-time test. Tests: tests/train/heads/test_recurrent.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_fast.heads.unroll import unroll
from specdec_fast.train.heads.loss_mask import masked_mean, split_loss_mask
from specdec_fast.train.heads.target_states import TargetStates

FINAL = "final_norm"


class _Trainee(nn.Module):
    """Computes losses and measurements of an EAGLE head over a frozen target.

    Args:
        head: The head.
        states: Hidden states of the target: those that the head reads, and the final norm.
        ahead: Number of steps to measure.

    Raises:
        ValueError: If `ahead` is below 1, or if a hidden state is missing.
    """

    def __init__(self, head: Any, states: TargetStates, ahead: int) -> None:
        super().__init__()
        if ahead < 1:
            raise ValueError(f"training steps ahead: got {ahead}; expected at least 1")
        missing = [name for name in (*head.aux_hidden_states, FINAL) if name not in states.aux_hidden_states]
        if missing:
            raise ValueError(
                f"training: got states without {missing[0]!r}; expected the head's auxiliary hidden states and "
                f"{FINAL!r}"
            )
        head.config._attn_implementation = "sdpa"
        self.head, self.states, self.ahead = head, states, ahead

    @property
    def logits_per_token(self) -> int:
        """Logits that a step keeps for every token: the target's, and the head's of every unrolled step."""
        rows, ids = self.states.model.get_input_embeddings().weight.shape[0], self.head.token_ids
        return int(rows + self._unrolled * (rows if ids is None else len(ids)))

    @property
    def _unrolled(self) -> int:
        """Steps of the head in training."""
        return 1

    def _embed(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            embedded: Tensor = self.states.model.get_input_embeddings()(tokens)
        return embedded.to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.head.parameters()).dtype

    def _project(self, hidden: Tensor) -> Tensor:
        return self.states.lm_head(hidden.to(self.states.model.dtype)).float()

    def _read(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.head.read(hidden, self._project)
        return found.float()

    @torch.no_grad()
    def _measures(self, tokens: Tensor, counts: Tensor, logits: Sequence[Tensor], whole: Tensor) -> dict[str, Tensor]:
        """Measures a head on held-out text.

        Args:
            tokens: Token ids, int64 [B, L].
            counts: Whether the token that the first step predicts has loss, bool [B, T].
            logits: Logits of every step, [B, T, columns].
            whole: The target's logits for the token that the first step predicts, [B, T, V].

        Returns:
            Measurements by name, none during training. `accepted_1`, ... is the acceptance rate of a token that is
            sampled at that step, under rule `rejection`: the overlap of both distributions. `tokens_per_step` is the
            yield of a chain of the best tokens.
        """
        if self.training:
            return {}
        found: dict[str, Tensor] = {}
        ids = self.head.token_ids
        dist = whole.softmax(-1)
        dist = dist if ids is None else dist[..., ids]
        right = torch.ones_like(tokens[:, 2:], dtype=torch.bool)
        total = torch.ones((), device=tokens.device)
        for step, own in enumerate(logits):
            text = tokens[:, 2 + step :]
            count = text.shape[1]
            if not count:
                break
            best = own[:, :count].argmax(-1)
            right = right[:, :count] & ((best if ids is None else ids[best]) == text)
            overlap = torch.minimum(dist[:, step : step + count, : own.shape[-1]], own[:, :count].softmax(-1))
            found[f"accepted_{step + 1}"] = masked_mean(overlap.sum(-1), counts[:, step : step + count])
            total = total + masked_mean(right, counts[:, :count])
        return {**found, "tokens_per_step": total}


class EagleTrainee(_Trainee):
    """Computes the loss of EAGLE-1: smooth L1 to the true state, and a cross-entropy to the target's distribution.

    Args:
        head: An EAGLE-1 head.
        states: Hidden states of the target.
        token_weight: Weight of the cross-entropy.
        noise: Half the width of the uniform noise on input states, for texts of 512 tokens as published.
        ahead: Number of steps to measure.
    """

    def __init__(
        self, head: Any, states: TargetStates, *, token_weight: float = 0.1, noise: float = 0.1, ahead: int = 4
    ) -> None:
        super().__init__(head, states, ahead)
        self.token_weight, self.noise = token_weight, noise

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the scalar loss and measurements by name, of stored tokens int64 [B, L] that have loss."""
        tokens, counts = _split_predicted(tokens)
        true = self.states(tokens)[FINAL].to(self._dtype)
        features = true[:, :-1]
        if self.training and self.noise:
            features = features + (torch.rand_like(features) * 2 - 1) * self.noise * 512 / tokens.shape[1]
        found = unroll(self.head, self._embed(tokens[:, 1:]), features, 1 if self.training else self.ahead)
        with torch.no_grad():
            whole = self._project(true[:, 1:])
            wanted = whole.softmax(-1)
        logits = self._read(found[0])
        away = functional.smooth_l1_loss(found[0].float(), true[:, 1:].float(), reduction="none").mean(-1)
        loss = masked_mean(away - self.token_weight * (wanted * logits.log_softmax(-1)).sum(-1), counts)
        return loss, self._measures(tokens, counts, [logits, *(self._read(hidden) for hidden in found[1:])], whole)


class Eagle3Trainee(_Trainee):
    """Computes the loss of EAGLE-3: over unrolled steps, decay ** step times the cross-entropy to the target.

    The target's distribution is restricted to the head's vocabulary. Positions whose likeliest token is outside of it
    are left out.

    Args:
        head: An EAGLE-3 head.
        states: Hidden states of the target.
        decay: Weight of a step relative to the previous one.
        ahead: Number of unrolled steps, and of steps to measure.

    Raises:
        ValueError: If `decay` is not above 0 and at most 1.
    """

    def __init__(self, head: Any, states: TargetStates, *, decay: float = 0.8, ahead: int = 7) -> None:
        super().__init__(head, states, ahead)
        if not 0 < decay <= 1:
            raise ValueError(f"training decay: got {decay}; expected a number above 0, at most 1")
        self.decay = decay

    @property
    def _unrolled(self) -> int:
        return self.ahead

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the scalar loss and measurements by name, of stored tokens int64 [B, L] that have loss."""
        tokens, counts = _split_predicted(tokens)
        states = self.states(tokens)
        features = self.head.fuse([states[name] for name in self.head.aux_hidden_states])[:, :-1]
        with torch.no_grad():
            whole = self._project(states[FINAL][:, 1:])
            ids = self.head.token_ids
            inside = torch.ones(whole.shape[-1], dtype=torch.bool, device=whole.device)
            if ids is not None:
                inside = torch.zeros_like(inside).index_fill_(0, ids, True)
            served = inside[whole.argmax(-1)] & counts
            dist = (whole if ids is None else whole[..., ids]).softmax(-1)
        ahead = min(self.ahead, tokens.shape[1] - 1)
        found = [self._read(hidden) for hidden in unroll(self.head, self._embed(tokens[:, 1:]), features, ahead)]
        loss = torch.zeros((), device=tokens.device)
        for step, logits in enumerate(found):
            count = dist.shape[1] - step
            each = -(dist[:, step:] * logits[:, :count].log_softmax(-1)).sum(-1)
            loss = loss + self.decay**step * masked_mean(each, served[:, step:])
        return loss, self._measures(tokens, counts, found, whole)


def _split_predicted(row: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tokens [B, L], and whether the token that each place's first step predicts has loss, bool [B, L - 1].

    The last place predicts a token beyond the text, and takes the mask of the last token.
    """
    tokens, counts = split_loss_mask(row)
    return tokens, torch.cat([counts[:, 2:], counts[:, -1:]], dim=1)


def frequent_ids(row: np.ndarray, count: int, vocab_size: int) -> Tensor:
    """Returns the most frequent token ids of a training row.

    Args:
        row: Stored tokens [N]. Only those with loss are counted.
        count: Number of ids.
        vocab_size: Vocabulary of the target.

    Returns:
        Ids, int64 [count], ascending. Of equally frequent ids, lower ones are preferred.

    Raises:
        ValueError: If `count` is out of range.
    """
    if not 1 <= count <= vocab_size:
        raise ValueError(f"draft vocabulary: got {count}; expected 1 to the target's {vocab_size}")
    seen = np.bincount(row[row >= 0], minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-seen, kind="stable")[:count]).astype(np.int64))


def layer_config(target: Any, **changes: Any) -> Any:
    """Returns the configuration of one Llama layer with the target's width; `changes` replace its fields."""
    from transformers import AutoConfig

    config = target.config.get_text_config()
    heads = config.num_attention_heads
    fields = {
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": target.get_input_embeddings().weight.shape[0],
        "max_position_embeddings": config.max_position_embeddings,
    }
    return AutoConfig.for_model("llama", **{**fields, "num_hidden_layers": 1, "tie_word_embeddings": False, **changes})


def new_eagle(target: Any, *, bias: bool = True, **changes: Any) -> Any:
    """Returns an untrained EAGLE-1 head for a transformers model; `changes` are those of `layer_config`."""
    from specdec_fast.heads.eagle import EagleHead

    return EagleHead(layer_config(target, **changes), bias=bias)


def new_eagle3(target: Any, ids: Tensor, layers: Sequence[int] | None = None, **changes: Any) -> Any:
    """Creates an untrained EAGLE-3 head, whose projection starts as the target's.

    Args:
        target: A transformers model with L layers.
        ids: Vocabulary of the head, int64, ascending.
        layers: Layers whose inputs the head reads. None: 2, L // 2 and L - 3, as published.
        changes: Fields of `layer_config`.

    Returns:
        The head.

    Raises:
        ValueError: If a layer does not exist.
    """
    from specdec_fast.heads.eagle3 import Eagle3Head

    count = target.config.get_text_config().num_hidden_layers
    read = list(layers) if layers is not None else [2, count // 2, count - 3]
    if any(not 0 <= index < count for index in read):
        raise ValueError(f"layers: got {read}; expected numbers from 0 to {count - 1}, the target's")
    projection = target.get_output_embeddings().weight
    head = Eagle3Head(
        layer_config(target, **changes),
        vocab_size=target.get_input_embeddings().weight.shape[0],
        draft_vocab_size=len(ids),
        aux_hidden_states=[f"entering:{index}" for index in read],
    )
    assert head.lm_head is not None
    with torch.no_grad():
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.lm_head.weight.copy_(projection[ids.to(projection.device)])
    return head
