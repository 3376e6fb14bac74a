"""EAGLE-1 and EAGLE-2 heads: the next hidden state out of a token's embedding and the hidden state before it.

Place i of a row pairs the target's feature of token i with the embedding of token i + 1, so that what was sampled is
known; it predicts the feature of token i + 1, and the target's own projection turns that into logits. The decoder layer
is transformers' own, without its first norm. Li et al. 2024 (EAGLE), section 4.1; EAGLE-2 uses the same weights. The
variant with norms is that of vLLM's `speculators` (`layernorms`).
Tests: tests/heads/test_eagle.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from specdec_kernels.names import unknown_name

LAYERS = {"llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer", "qwen3": "Qwen3DecoderLayer"}


class EagleHead(nn.Module):
    """config: of one or more Llama or Qwen3 layers, as transformers reads it; bias: whether `fc` has one; layernorms:
    norms of the embedding, before the layer and before the projection, which the published heads do not have.

    auxiliary hidden states: the hidden states of the target that it reads; token_ids: what its columns of logits
    stand for, None: all ids.
    """

    token_ids: Tensor | None = None

    def __init__(self, config: Any, *, bias: bool = True, layernorms: bool = False) -> None:
        super().__init__()
        self.config = config
        self.aux_hidden_states: tuple[str, ...] = ("final_norm",)
        self.hidden_size: int = config.hidden_size
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=bias)
        self.layers = nn.ModuleList(decoder_layers(config))
        if not layernorms:
            self.layers[0].input_layernorm = nn.Identity()
        self.embedding_layernorm = rms_norm(config) if layernorms else None
        self.pre_lm_head_layernorm = rms_norm(config) if layernorms else None
        self.rotary_emb = rotary(config)

    def fuse(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """Features [M, hidden] out of the target's hidden states [M, hidden], in the order of `aux_hidden_states`."""
        return aux_hidden_states[0]

    def forward(self, embedded: Tensor, features: Tensor, position_ids: Tensor, **context: Any) -> Tensor:
        """Predicted features, [1, M, hidden].

        embedded, features: [1, M, hidden], of a token and of the token before it; position_ids: int64 [1, M];
        context goes to the attention (`packed`, or `attention_mask` and `past_key_values`).
        """
        embedded = embedded if self.embedding_layernorm is None else self.embedding_layernorm(embedded)
        hidden = self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        turned = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=position_ids, position_embeddings=turned, **context)
        return hidden

    def read(self, hidden: Tensor, lm_head: Any) -> Tensor:
        """Logits of predicted features [..., hidden]. lm_head: the target's projection."""
        found: Tensor = lm_head(hidden if self.pre_lm_head_layernorm is None else self.pre_lm_head_layernorm(hidden))
        return found


def decoder_layers(config: Any) -> list[nn.Module]:
    """The layers of a configuration as transformers builds them. Raises ValueError for another kind of model."""
    kind = getattr(config, "model_type", None)
    if kind not in LAYERS:
        raise ValueError(unknown_name("head layers of model_type", kind, LAYERS))
    layer: Any = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), LAYERS[kind])
    return [layer(config, index) for index in range(config.num_hidden_layers)]


def rotary(config: Any) -> nn.Module:
    """The rotary embedding of the head's own configuration, never the target's."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(config)


def rms_norm(config: Any, width: int | None = None) -> nn.Module:
    """An RMS norm with the epsilon of a configuration."""
    return nn.RMSNorm(width or config.hidden_size, eps=config.rms_norm_eps)
