"""Multi-token prediction as DeepSeek-V3 has it: one decoder layer of the target's kind, trained along with the target.

Place i of a row pairs the target's last hidden state of token i with the embedding of token i + 1, each under a norm of
its own; a projection makes one vector of both, a decoder layer and a norm follow, and the target's own projection turns
the result into logits of token i + 2. The result also stands in for the hidden state of the next place, so that one
module drafts as far as is wanted. DeepSeek-AI 2024 (DeepSeek-V3), section 2.2. Tests: tests/heads/test_mtp.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MtpHead(nn.Module):
    """config: the target's, of the one layer here; layer, rotary_emb: of the target's kind; norm: its kind of RMS norm.

    hidden_first: the projection reads the hidden state before the embedding (MiMo), not behind it (all others).
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

    def fuse(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """Features [M, hidden] out of the target's hidden states [M, hidden], in the order of `aux_hidden_states`."""
        return aux_hidden_states[0]

    def forward(self, embedded: Tensor, features: Tensor, position_ids: Tensor, **context: Any) -> Tensor:
        """What stands in for the features of the next place, [1, M, hidden].

        embedded, features: [1, M, hidden], of a token and of the token before it; position_ids: int64 [1, M];
        context goes to the attention (`packed`, or `attention_mask` and `past_key_values`).
        """
        both = [self.enorm(embedded), self.hnorm(features.to(embedded.dtype))]
        hidden = self.eh_proj(torch.cat(both[::-1] if self.hidden_first else both, dim=-1))
        turned = self.rotary_emb(hidden, position_ids)
        asked = {"attention_mask": None, **context}
        hidden = self.layer(hidden, position_ids=position_ids, position_embeddings=turned, **asked)
        found: Tensor = self.norm(hidden)
        return found

    def read(self, hidden: Tensor, lm_head: Any) -> Tensor:
        """Logits of what `forward` gave, [..., hidden]. lm_head: the target's projection, which is shared."""
        found: Tensor = lm_head(hidden)
        return found


def mtp_head(target: Any, *, hidden_first: bool = False) -> MtpHead:
    """An untrained module of the kind of a target's decoder layers, as transformers builds them.

    Raises ValueError, with the reason, for targets whose layers cannot be built alone or attend in another way.
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
    odd = sorted({name for name in _kinds_of_layers(config) if not name.endswith("attention") or "linear" in name})
    if odd or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"mtp: got a target with recurrent layers ({kind}: {', '.join(odd) or 'stateful'}); expected attention "
            "layers only; state cannot be rolled back by forgetting slots"
        )
    last = target.layers[-1]
    norm = getattr(last, "input_layernorm", None)
    turns = getattr(model.base_model, "rotary_emb", None)
    if norm is None or turns is None or not hasattr(config, "rms_norm_eps"):
        raise ValueError(
            f"mtp: got a target of model_type {kind!r}; expected decoder layers with an RMS norm input_layernorm and "
            "rotary positions (Llama, Qwen, Mistral, GLM and their kin)"
        )
    config.num_hidden_layers = 1
    for name, own in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        if getattr(config, name, None):
            chosen = getattr(config, own, None) or [_usual(name, getattr(config, name))]
            setattr(config, name, list(chosen)[:1])
    for name, value in (("first_k_dense_replace", 0), ("mlp_only_layers", [])):  # a module is like the later layers
        if hasattr(config, name):
            setattr(config, name, value)
    build: Any = type(last)
    return MtpHead(config, build(config, 0), type(norm), type(turns)(config), hidden_first=hidden_first)


def _kinds_of_layers(config: Any) -> list[str]:
    return [str(kind) for kind in getattr(config, "layer_types", None) or ()]


def _usual(name: str, kinds: Sequence[str]) -> str:
    """The kind of a module's layer where its configuration names none: full attention if there is some, or the last."""
    return "full_attention" if name == "layer_types" and "full_attention" in kinds else kinds[-1]
