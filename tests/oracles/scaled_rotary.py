"""Tiny models whose rotary frequencies depend on the length of a text, and the same models with one set for all texts.

The second kind has the frequencies of one side of the switch by other means than the first: equal factors for short
and long texts, or another base. So transformers' own passes over it are what a pinned request should compute.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from specdec_fast.targets.tiny_models import tiny_model

SWITCH, LIMIT = 40, 160
"""Longest text with the first frequencies, and longest text."""
SHORT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
LONG = [1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
KINDS = ("longrope", "dynamic", "phi3", "phimoe")


def _build(kind: str, rope: dict[str, Any], positions: int) -> Any:
    family = "llama" if kind in ("longrope", "dynamic") else kind
    changes: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": positions}
    if kind == "phi3":
        changes["original_max_position_embeddings"] = SWITCH
    model = tiny_model(family, **changes)
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def _model(kind: str, side: str) -> Any:
    if kind == "dynamic":
        rope: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
        if side == "long":
            width = 16
            base = 100.0 * (4.0 * LIMIT / SWITCH - 3.0) ** (width / (width - 2))
            rope = {"rope_type": "default", "rope_theta": base}
        elif side == "short":
            rope = {"rope_type": "default", "rope_theta": 100.0}
        return _build(kind, rope, SWITCH if side == "both" else LIMIT)
    rope = {
        "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": SWITCH,
        "short_factor": LONG if side == "long" else SHORT, "long_factor": SHORT if side == "short" else LONG,
        "attention_factor": 1.2,
    }  # fmt: skip
    if kind == "phimoe":
        rope |= {
            "short_factor": SHORT, "short_mscale": 1.9 if side == "long" else 1.2,
            "long_mscale": 1.2 if side == "short" else 1.9,
        }  # fmt: skip
    return _build(kind, rope, LIMIT)


def scaled_model(kind: str) -> Any:
    """A model of a kind for a target."""
    return copy.deepcopy(_model(kind, "both"))


@functools.cache
def fixed_model(kind: str, side: str) -> Any:
    """The model with the frequencies of one side, "short" or "long", and transformers' own attention."""
    fixed = copy.deepcopy(_model(kind, side))
    fixed.load_state_dict(_model(kind, "both").state_dict())
    return fixed.eval()


def side_of(longest: int) -> str:
    """The side of a request whose text may have so many tokens."""
    return "long" if longest > SWITCH else "short"


def own_logits(kind: str, side: str, text: list[int]) -> torch.Tensor:
    """Logits after every token of a text, by transformers' own pass."""
    with torch.no_grad():
        found: torch.Tensor = fixed_model(kind, side)(torch.tensor([text]), use_cache=False).logits[0]
    return found
