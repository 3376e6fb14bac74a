"""Multi-token prediction modules of DeepSeek-V3's kind: one decoder layer of the target's type, trained with the
target.

Place i of a row pairs the target's last hidden state of token i with the embedding of token i + 1, each under its own
norm. A projection joins both, and a decoder layer and a norm follow. The target's projection turns the result into
logits of token i + 2, unless the module has tables of its own. The result also replaces the hidden state of the next
place, so one module can draft any number of tokens. Tests: tests/heads/test_mtp.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_OTHERS = "use a trained head (eagle, eagle3, medusa, blockwise) or a drafter that needs none (ngram, suffix)"


class MtpHead(nn.Module):
    """A multi-token prediction module.

    Args:
        config: The target's configuration, for the one layer here.
        layer: A decoder layer of the target's type.
        norm: Class of the target's RMS norm.
        rotary_emb: Rotary embedding of the target's type.
        hidden_first: The projection reads the hidden state before the embedding (MiMo); otherwise behind it.

    Attributes:
        embed_tokens: The module's own embedding. None: the target's.
        lm_head: The module's own projection. None: the target's.

    Source:
        DeepSeek-AI 2024 (DeepSeek-V3), section 2.2.
    """

    token_ids: Tensor | None = None

    def __init__(
        self, config: Any, layer: nn.Module, norm: type[nn.Module], rotary_emb: nn.Module, *, hidden_first: bool = False
    ) -> None:
        super().__init__()
        self.config, self.hidden_first = config, hidden_first
        self.aux_hidden_states: tuple[str, ...] = ("final_norm",)
        width: int = config.hidden_size
        self.hidden_size = width
        self.enorm, self.hnorm, self.norm = (norm(width, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = layer
        self.rotary_emb = rotary_emb
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None

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
        both = [self.enorm(embedded), self.hnorm(features.to(embedded.dtype))]
        hidden = self.eh_proj(torch.cat(both[::-1] if self.hidden_first else both, dim=-1))
        rotation = self.rotary_emb(hidden, position_ids)
        arguments = {"attention_mask": None, **context}
        hidden = self.layer(hidden, position_ids=position_ids, position_embeddings=rotation, **arguments)
        found: Tensor = self.norm(hidden)
        return found

    def read(self, hidden: Tensor, lm_head: Any) -> Tensor:
        """Returns the logits of predicted features [..., hidden], by the module's own projection or the target's."""
        found: Tensor = (lm_head if self.lm_head is None else self.lm_head)(hidden)
        return found


def build_mtp_head(target: Any, *, hidden_first: bool = False) -> MtpHead:
    """Builds an untrained module with a decoder layer of the target's type.

    Args:
        target: The target.
        hidden_first: The projection reads the hidden state before the embedding (MiMo).

    Returns:
        The module.

    Raises:
        ValueError: If the target has latent attention, no layer with attention, or layers that cannot be built alone.
    """
    model = target.model
    config = copy.deepcopy(model.config.get_text_config())
    kind = str(config.model_type)
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"mtp: got a target with latent attention ({kind}, kv_lora_rank {config.kv_lora_rank}); expected keys and "
            "values by head, num_key_value_heads of head_dim, which the cache of a head stores; use a drafter without "
            "a head (ngram, suffix) or a draft model"
        )
    attending = _layer_with_attention(target, config)
    norm = getattr(attending, "input_layernorm", None)
    rotary = getattr(model.base_model, "rotary_emb", None)
    if norm is None or rotary is None or not hasattr(config, "rms_norm_eps"):
        raise ValueError(
            f"mtp: got a target of model_type {kind!r}; expected decoder layers with an RMS norm input_layernorm and "
            "rotary positions (Llama, Qwen, Mistral, GLM and their kin)"
        )
    config.num_hidden_layers = 1
    for name, own in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        if getattr(config, name, None):
            chosen = getattr(config, own, None) or [_default_layer_type(name, getattr(config, name))]
            try:
                setattr(config, name, list(chosen)[:1])
            except AttributeError as error:
                raise ValueError(
                    f"mtp: got a target of model_type {kind!r}, whose configuration computes its {name}; expected one "
                    f"that stores them, as Qwen3-Next and Qwen3.5 do; {_OTHERS}"
                ) from error
    for name, value in (("first_k_dense_replace", 0), ("mlp_only_layers", [])):  # a module is like the last layers
        if hasattr(config, name):
            setattr(config, name, value)
    build: Any = type(attending)
    return MtpHead(config, build(config, 0), type(norm), type(rotary)(config), hidden_first=hidden_first)


def _layer_with_attention(target: Any, config: Any) -> Any:
    """The last decoder layer with attention. Raises ValueError if there is none."""
    kinds = _layer_types(config)
    odd = sorted({each for each in kinds if not _is_attention(each)})
    if not odd and not getattr(target.model, "_is_stateful", False):
        return target.layers[-1]
    found = [at for at, each in enumerate(kinds) if _is_attention(each)]
    if not found:
        raise ValueError(
            f"mtp: got a target with recurrent layers ({config.model_type}: {', '.join(odd) or 'stateful'}); expected "
            f"layer_types that name a layer of attention alone, since a module is such a layer; {_OTHERS}"
        )
    return target.layers[found[-1]]


def _layer_types(config: Any) -> list[str]:
    return [str(kind) for kind in getattr(config, "layer_types", None) or ()]


def _is_attention(kind: str) -> bool:
    """Whether a type of layer has keys and values."""
    return kind.endswith("attention") and "linear" not in kind


def _default_layer_type(name: str, kinds: Sequence[str]) -> str:
    """Type of the module's layer if the configuration names none: full attention if present, else the last type."""
    return "full_attention" if name == "layer_types" and "full_attention" in kinds else kinds[-1]
