"""Tiny random models for the tests: untouched copies that answer, and copies that the engine may keep."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch

from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.tiny import FAMILIES, tiny_model

FAMILY_NAMES = tuple(FAMILIES)
PROMPT_LENGTHS = (1, 2, 5, 17, 40, 75, 130, 200)


@functools.cache
def untouched(family: str, attention: str = "sdpa") -> Any:
    """A tiny model with transformers' own attention. Not to be given to a target (that would change its
    attention).
    """
    model = tiny_model(family)
    model.set_attn_implementation(attention if model._supports_sdpa else "eager")
    model.generation_config.eos_token_id = None
    return model


def own(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of the same model for a target to keep."""
    return copy.deepcopy(untouched(family)).to(dtype)


def kin(family: str, noise: float = 0.15, seed: int = 5) -> Any:
    """The same model with noise of relative size `noise` on every matrix: a draft that is often right."""
    model = copy.deepcopy(untouched(family))
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(torch.randn(parameter.shape, generator=source) * parameter.std() * noise)
    return model


def target(family: str, **shape: Any) -> HuggingFaceTarget:
    """A target over its own copy of the tiny model."""
    return HuggingFaceTarget(own(family), **{"max_length": 320, **shape})


def medusa_heads(large: HuggingFaceTarget) -> MedusaHeads:
    """Three Medusa heads that begin from the projection of a target."""
    heads = MedusaHeads(large.hidden_size, large.num_embeddings, 3)
    torch.manual_seed(0)
    heads.start_from(large.model.get_output_embeddings().weight)
    torch.nn.init.normal_(heads.weight, std=0.05)
    return heads


def prompt(length: int, vocab: int = 96) -> list[int]:
    """A random prompt, the same for the same length; every second half repeats its first, so that look-up
    finds something.
    """
    source = torch.Generator().manual_seed(100 + length)
    half = torch.randint(1, vocab, (-(-length // 2),), generator=source).tolist()
    return (half + half)[:length]


@functools.cache
def _greedy_text(family: str, attention: str, length: int, new_tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt(length)])
    out = untouched(family, attention).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
    )
    return tuple(out[0, length:].tolist())


def greedy_text(family: str, length: int, new_tokens: int, attention: str = "sdpa") -> list[int]:
    """What transformers' `generate` appends to `prompt(length)` without sampling; no end-of-sequence id."""
    return list(_greedy_text(family, attention, length, max(32, new_tokens))[:new_tokens])


def until(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to and including the first that is in `ends`."""
    for index, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: index + 1])
    return list(tokens)
