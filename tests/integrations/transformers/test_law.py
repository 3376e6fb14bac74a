"""The joint distribution of three tokens that an attached model samples, against exact enumeration.

The exact distribution is that of transformers' code: its forward for every text, then its logits processors.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from oracles.chi_square import p_value
from transformers import TopKLogitsWarper

from specdec_fast.integrations.transformers import attach, attached, detach
from specdec_fast.targets.tiny_models import tiny_model

V, LENGTH = 4, 3
PROMPT = [2, 3, 1]
SHAPE = {"vocab_size": V, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "logit_std": 1.5}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": None, "pad_token_id": 0}


class Alternates:
    """A processor of a user: what is likely depends on the last two tokens of the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, text in enumerate(input_ids):
            scores[row, int(text[-1] + text[-2]) % V] += 1.5
        return scores


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.9},
    "processor": {"temperature": 0.9, "top_k": 3, "logits_processor": [Alternates()]},
    # a user's warper stays behind the user's processor, and before those of the config
    "filters": {"temperature": 0.8, "top_p": 0.9, "logits_processor": [TopKLogitsWarper(2), Alternates()]},
    "typical": {"typical_p": 0.9, "repetition_penalty": 1.5},
}
CASES = [
    ("replay", "plain", 4000),
    ("rejection", "plain", 4000),
    ("replay", "processor", 800),
    ("rejection", "processor", 800),
    ("replay", "filters", 800),
    ("rejection", "typical", 800),
]


def exact(model: Any, settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Probabilities of all texts, by transformers' forward and processors."""
    from transformers import GenerationConfig, LogitsProcessorList

    given = {"top_k": 0, **settings}
    own = LogitsProcessorList(given.pop("logits_processor", []))
    config = GenerationConfig(do_sample=True, top_p=given.pop("top_p", 1.0), **given)
    processors = model._get_logits_processor(config, input_ids_seq_length=len(PROMPT), logits_processor=own)
    found = {(): 1.0}
    for _ in range(LENGTH):
        texts = torch.tensor([[*PROMPT, *text] for text in found])
        with torch.no_grad():
            laws = processors(texts, model(texts).logits[:, -1].float()).softmax(-1).double()
        found = {
            (*text, token): chance * float(law[token])
            for (text, chance), law in zip(found.items(), laws, strict=True)
            for token in range(V)
        }
    return found


def sampled(model: Any, settings: dict[str, Any], texts: int) -> Counter[tuple[int, ...]]:
    prompts = torch.tensor([PROMPT] * (texts // 4))
    given = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH + 2, "num_return_sequences": 4, **settings}
    found = model.generate(prompts, seed=list(range(texts)), **given)
    return Counter(map(tuple, found[:, len(PROMPT) : len(PROMPT) + LENGTH].tolist()))


@pytest.mark.parametrize(("rule", "name", "texts"), CASES)
def test_sampled_texts_have_the_law_of_transformers(rule: str, name: str, texts: int) -> None:
    model, draft = tiny_model("llama", **SHAPE), tiny_model("llama", **{**SHAPE, "seed": 1})
    expected = exact(model, SETTINGS[name])
    attach(model, draft, rule=rule, num_draft_tokens=2, max_rows=500, max_length=16)
    assert p_value(sampled(model, SETTINGS[name], texts), expected) > 1e-3
    stats = attached(model).engine.stats
    assert 0.05 < stats.alpha < 0.98, "all accepted or all refused: the test would prove little"
    detach(model)
