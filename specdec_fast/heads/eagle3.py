"""EAGLE-3 heads: three hidden states of the target, fused; a wide first layer; a vocabulary of their own.

Place i of a row pairs the fused hidden states of token i with the embedding of token i + 1. Behind the newest token the
head's own output stands in for the fused states. Li et al. 2025 (EAGLE-3), section 3; the variants of norms are those
of vLLM's `speculators`. Tests: tests/heads/test_eagle.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec_fast.heads.eagle import decoder_layers, rms_norm, rotary


class Eagle3Head(nn.Module):
    """config: of its layers, as transformers reads it; vocab_size: the target's; draft_vocab_size: columns of logits.

    auxiliary hidden states: three (or other) hidden states of the target; target_hidden_size: their width;
    norm_before_residual: the first layer adds to the normed features; norm_before_fc: one norm over the joined hidden
    states; fc_norm: one for each; norm_output: what it hands to the next place is normed. d2t (int64): column c
    stands for id c + d2t[c].
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
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        own_embedding: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.aux_hidden_states = tuple(aux_hidden_states)
        self.vocab_size = vocab_size
        self.hidden_size: int = config.hidden_size
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        tapped = len(self.aux_hidden_states) * (target_hidden_size or config.hidden_size)
        self.fc = nn.Linear(tapped, config.hidden_size, bias=False)
        self.input_norm = rms_norm(config, tapped) if norm_before_fc else None
        each = (
            [rms_norm(config, tapped // len(self.aux_hidden_states)) for _ in self.aux_hidden_states]
            if fc_norm
            else None
        )
        self.fc_norm = None if each is None else nn.ModuleList(each)
        self.layers = nn.ModuleList(decoder_layers(config))
        first: Any = self.layers[0]
        first.hidden_norm = rms_norm(config)
        for name in ("q_proj", "k_proj", "v_proj"):  # they read the embedding beside the features
            narrow = getattr(first.self_attn, name)
            bias = narrow.bias is not None
            setattr(first.self_attn, name, nn.Linear(2 * config.hidden_size, narrow.out_features, bias=bias))
        self.norm = rms_norm(config)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size) if own_embedding else None
        self.rotary_emb = rotary(config)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))

    @property
    def token_ids(self) -> Tensor | None:
        """int64 [draft_vocab_size]: ids of the target that the columns of the logits stand for; None: all of them."""
        if self.lm_head.out_features == self.vocab_size:
            return None
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def fuse(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """Features [M, hidden] out of the target's hidden states [M, target hidden], in the order of
        `aux_hidden_states`.
        """
        parts = [aux_hidden_state.to(self.fc.weight.dtype) for aux_hidden_state in aux_hidden_states]
        if self.fc_norm is not None:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts)]
        joined = torch.cat(parts, dim=-1)
        found: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return found

    def forward(self, embedded: Tensor, features: Tensor, position_ids: Tensor, **context: Any) -> Tensor:
        """What stands in for the features of the next place, [1, M, hidden].

        embedded, features: [1, M, hidden], of a token and of the token before it; position_ids: int64 [1, M];
        context goes to the attention (`packed`, or `attention_mask` and `past_key_values`).
        """
        first: Any = self.layers[0]
        normed = first.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        turned = self.rotary_emb(features, position_ids)
        wide = torch.cat([first.input_layernorm(embedded.to(normed.dtype)), normed], dim=-1)
        hidden = residual + first.self_attn(hidden_states=wide, position_embeddings=turned, **_asked(context))[0]
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in self.layers[1:]:
            hidden = layer(hidden, position_ids=position_ids, position_embeddings=turned, **context)
        return self.norm(hidden) if self.norm_output else hidden

    def read(self, hidden: Tensor, lm_head: Any) -> Tensor:
        """Logits [..., draft_vocab_size] of what `forward` gave. lm_head: the target's projection, not used."""
        found: Tensor = self.lm_head(hidden if self.norm_output else self.norm(hidden))
        return found


def _asked(context: dict[str, Any]) -> dict[str, Any]:
    """What an attention wants to be told in any case."""
    return {"attention_mask": None, **context}
