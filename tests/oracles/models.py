"""Tiny random models for tests: untouched copies as references, and copies for the engine."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.tiny_models import FAMILIES, SHAPE, tiny_model

FAMILY_NAMES = tuple(FAMILIES)
PROMPT_LENGTHS = (1, 2, 5, 17, 40, 75, 130, 200)


@functools.cache
def untouched(family: str, attention: str = "sdpa") -> Any:
    """Returns a tiny model with transformers' own attention. A target would change it, so targets must not get it."""
    model = tiny_model(family)
    capped = getattr(model.config, "attn_logit_softcapping", None)  # torch's function leaves caps out
    model.set_attn_implementation(attention if model._supports_sdpa and not capped else "eager")
    model.generation_config.eos_token_id = None
    return model


def own(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a copy of the same model for a target."""
    return copy.deepcopy(untouched(family)).to(dtype)


def kin(family: str, noise: float = 0.15, seed: int = 5) -> Any:
    """Returns the same model with noise of relative size `noise` on every matrix: a draft that is often right."""
    model = copy.deepcopy(untouched(family))
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(torch.randn(parameter.shape, generator=source) * parameter.std() * noise)
    return model


def target(family: str, **shape: Any) -> HuggingFaceTarget:
    """Returns a target over its own copy of the tiny model."""
    return HuggingFaceTarget(own(family), **{"max_length": 320, **shape})


def glm() -> Any:
    """Returns a tiny GLM-4.5: experts in every layer but the first, and modules of multi-token prediction."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**SHAPE, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **shape, **experts)).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def medusa_heads(large: HuggingFaceTarget) -> MedusaHeads:
    """Returns three Medusa heads that start from the projection of a target."""
    heads = MedusaHeads(large.hidden_size, large.num_embeddings, 3)
    torch.manual_seed(0)
    heads.start_from(large.model.get_output_embeddings().weight)
    torch.nn.init.normal_(heads.weight, std=0.05)
    return heads


def blockwise_heads(large: HuggingFaceTarget) -> BlockwiseHeads:
    """Returns three blockwise heads, which at the start equal the target's next-token prediction."""
    return BlockwiseHeads(large.hidden_size, large.num_embeddings, 3)


HEADS: dict[str, Callable[[HuggingFaceTarget], Any]] = {"blockwise": blockwise_heads, "medusa": medusa_heads}


def prompt(length: int, vocab: int = 96) -> list[int]:
    """Returns a random prompt, always the same for one length. Its second half repeats the first, so that look-ups
    succeed.
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
    """Returns the greedy text of transformers' `generate` after `prompt(length)`, without end-of-sequence ids."""
    return list(_greedy_text(family, attention, length, max(32, new_tokens))[:new_tokens])


def until(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Returns the tokens up to and including the first one in `ends`."""
    for index, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: index + 1])
    return list(tokens)


def own_text(model: Any) -> list[int]:
    """The text of transformers' own generate."""
    tokens = torch.tensor([prompt(17)])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0].tolist()
