"""EAGLE-1 and EAGLE-2 heads: predict the next hidden state from a token's embedding and the hidden state before it.

Place i of a row pairs the target's feature of token i with the embedding of token i + 1, so the sampled token is known.
It predicts the feature of token i + 1, which the target's projection turns into logits, unless the head was trained
with tables of its own. The decoder layer is transformers' own, without its first norm. The variant with norms is that
of vLLM's `speculators` (`layernorms`).
Tests: tests/heads/test_eagle.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from specdec_kernels.unknown_names import unknown_name

LAYERS = {"llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer", "qwen3": "Qwen3DecoderLayer"}


class EagleHead(nn.Module):
    """An EAGLE-1 or EAGLE-2 head.

    Args:
        config: Configuration of its Llama, Qwen2 or Qwen3 layers, as transformers reads it.
        bias: Whether `fc` has a bias.
        layernorms: Norms of the embedding, before the layer and before the projection. Published heads have none.
        embed_tokens: The head's own embedding. None: the target's.
        lm_head: The head's own projection. None: the target's.

    Attributes:
        aux_hidden_states: Hidden states of the target that the head reads.
        token_ids: None: the columns of the logits are the target's ids.

    Source:
        Li et al. 2024 (EAGLE), section 4.1. EAGLE-2 uses the same weights.
    """

    token_ids: Tensor | None = None

    def __init__(
        self,
        config: Any,
        *,
        bias: bool = True,
        layernorms: bool = False,
        embed_tokens: nn.Embedding | None = None,
        lm_head: nn.Linear | None = None,
    ) -> None:
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
        self.windows = sliding_windows(config)
        self.embed_tokens, self.lm_head = embed_tokens, lm_head

    def fuse(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """Fuses hidden states [M, hidden] of the target, in the order of the attribute, into features [M, hidden]."""
        return aux_hidden_states[0]

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
        embedded = embedded if self.embedding_layernorm is None else self.embedding_layernorm(embedded)
        hidden = self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        rotation = self.rotary_emb(hidden, position_ids)
        for layer, window in zip(self.layers, self.windows):
            hidden = layer(hidden, position_ids=position_ids, position_embeddings=rotation, **context, **window)
        return hidden

    def read(self, hidden: Tensor, lm_head: Any) -> Tensor:
        """Returns the logits of predicted features [..., hidden], by the head's own projection or the target's."""
        project = lm_head if self.lm_head is None else self.lm_head
        found: Tensor = project(hidden if self.pre_lm_head_layernorm is None else self.pre_lm_head_layernorm(hidden))
        return found


def decoder_layers(config: Any) -> list[nn.Module]:
    """Builds the layers of a configuration with transformers. Raises ValueError for other model types."""
    kind = getattr(config, "model_type", None)
    if kind not in LAYERS:
        raise ValueError(unknown_name("head layers of model_type", kind, LAYERS))
    layer: Any = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), LAYERS[kind])
    return [layer(config, index) for index in range(config.num_hidden_layers)]


def sliding_windows(config: Any) -> list[dict[str, int]]:
    """Returns the argument `sliding_window` of each layer whose type names it, else no argument.

    transformers' Qwen layers read the configuration themselves; its Llama layers do not.
    """
    kinds, window = getattr(config, "layer_types", None) or [], getattr(config, "sliding_window", None)
    count = config.num_hidden_layers
    if config.model_type != "llama" or not window or len(kinds) < count:
        return [{}] * count
    return [{"sliding_window": window} if kind == "sliding_attention" else {} for kind in kinds[:count]]


def rotary(config: Any) -> nn.Module:
    """Builds the rotary embedding of the head's own configuration, never the target's."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(config)


def rms_norm(config: Any, width: int | None = None) -> nn.Module:
    """Builds an RMS norm with the epsilon of a configuration."""
    return nn.RMSNorm(width or config.hidden_size, eps=config.rms_norm_eps)
