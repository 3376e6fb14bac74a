"""EAGLE-3 heads: fused hidden states of the target, a wide first layer, and often a vocabulary of their own.

Place i of a row pairs the fused hidden states of token i with the embedding of token i + 1. Behind the newest token,
the head's own output replaces the fused states. The variants of norms are those of vLLM's `speculators`.
Tests: tests/heads/test_eagle.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec_fast.heads.eagle import decoder_layers, rms_norm, rotary, sliding_windows


class Eagle3Head(nn.Module):
    """An EAGLE-3 head.

    Args:
        config: Configuration of its layers, as transformers reads it.
        vocab_size: Vocabulary of the target.
        draft_vocab_size: Columns of the logits.
        aux_hidden_states: Hidden states of the target that the head reads, usually three.
        target_hidden_size: Width of these states. None: the head's own.
        fuses: Whether `fc` fuses the states. Without it the head reads one state as it is.
        bias: Whether `fc` has a bias.
        norm_before_residual: The first layer adds to the normed features.
        norm_before_fc: One norm over the joined hidden states.
        fc_norm: One norm for each of them.
        norm_output: The output that feeds the next place is normed.
        embed_tokens: The head's own embedding. None: the target's.
        own_lm_head: Whether the head has a projection of its own. Otherwise the target's is used.

    Attributes:
        d2t: Column c stands for id c + d2t[c], int64 [draft_vocab_size].

    Source:
        Li et al. 2025 (EAGLE-3), section 3.
    """

    d2t: Tensor

    def __init__(
        self,
        config: Any,
        *,
        vocab_size: int,
        draft_vocab_size: int,
        aux_hidden_states: Sequence[str],
        target_hidden_size: int | None = None,
        fuses: bool = True,
        bias: bool = False,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        embed_tokens: nn.Embedding | None = None,
        own_lm_head: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.aux_hidden_states = tuple(aux_hidden_states)
        self.vocab_size = vocab_size
        self.hidden_size: int = config.hidden_size
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        joined_size = len(self.aux_hidden_states) * (target_hidden_size or config.hidden_size)
        self.fc = nn.Linear(joined_size, config.hidden_size, bias=bias) if fuses else None
        self.input_norm = rms_norm(config, joined_size) if norm_before_fc else None
        each = (
            [rms_norm(config, joined_size // len(self.aux_hidden_states)) for _ in self.aux_hidden_states]
            if fc_norm
            else None
        )
        self.fc_norm = None if each is None else nn.ModuleList(each)
        self.layers = nn.ModuleList(decoder_layers(config))
        first: Any = self.layers[0]
        first.hidden_norm = rms_norm(config)
        for name in ("q_proj", "k_proj", "v_proj"):  # they read embedding and features
            narrow = getattr(first.self_attn, name)
            bias = narrow.bias is not None
            setattr(first.self_attn, name, nn.Linear(2 * config.hidden_size, narrow.out_features, bias=bias))
        self.norm: Any = rms_norm(config)
        self.draft_vocab_size = draft_vocab_size
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False) if own_lm_head else None
        self.embed_tokens = embed_tokens
        self.rotary_emb = rotary(config)
        self.windows = sliding_windows(config)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))

    @property
    def token_ids(self) -> Tensor | None:
        """Target ids of the columns of the logits, int64 [draft_vocab_size]. None: all ids."""
        if self.draft_vocab_size == self.vocab_size:
            return None
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def fuse(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """Fuses hidden states [M, target hidden], in the order of the attribute, into features [M, hidden]."""
        parts = [aux_hidden_state.to(self.norm.weight.dtype) for aux_hidden_state in aux_hidden_states]
        if self.fc_norm is not None:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts)]
        joined = torch.cat(parts, dim=-1)
        joined = joined if self.input_norm is None else self.input_norm(joined)
        return joined if self.fc is None else self.fc(joined)

    def forward(self, embedded: Tensor, features: Tensor, position_ids: Tensor, **context: Any) -> Tensor:
        """Predicts the features of the next positions.

        Args:
            embedded: Embeddings of tokens, [1, M, hidden].
            features: Features of the token before each, [1, M, hidden].
            position_ids: Positions, int64 [1, M].
            **context: Arguments of the attention: `packed`, or `attention_mask` and `past_key_values`.

        Returns:
            Predicted features, [1, M, hidden].
        """
        first: Any = self.layers[0]
        normed = first.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        rotation = self.rotary_emb(features, position_ids)
        wide = torch.cat([first.input_layernorm(embedded.to(normed.dtype)), normed], dim=-1)
        arguments = {"attention_mask": None, **context, **self.windows[0]}
        hidden = residual + first.self_attn(hidden_states=wide, position_embeddings=rotation, **arguments)[0]
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer, window in zip(self.layers[1:], self.windows[1:]):
            hidden = layer(hidden, position_ids=position_ids, position_embeddings=rotation, **context, **window)
        return self.norm(hidden) if self.norm_output else hidden

    def read(self, hidden: Tensor, lm_head: Any) -> Tensor:
        """Returns the logits [..., columns] of predicted features, by the head's own projection or the target's."""
        project = lm_head if self.lm_head is None else self.lm_head
        found: Tensor = project(hidden if self.norm_output else self.norm(hidden))
        return found
