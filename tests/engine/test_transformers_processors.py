"""Sampling parameters with a counterpart in transformers: greedy text is that of transformers' own processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import models
from oracles.noisy_oracle import NoisyChain, NoisyTree
from transformers import MinPLogitsWarper, NoRepeatNGramLogitsProcessor

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter

PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "reward": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "bad words": ({"banned_token_ids": (3, 60, 71)}, {"bad_words_ids": [[3], [60], [71]]}),
    "words of several tokens": (
        {"bad_words": ((3,), (8, 60), (17, 5, 9), *((first, first) for first in range(96)))},
        {"bad_words_ids": [[3], [8, 60], [17, 5, 9], *([first, first] for first in range(96))]},
    ),
    "n-grams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "single tokens": ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    "processors": (
        {"logits_processors": [NoRepeatNGramLogitsProcessor(3), MinPLogitsWarper(0.2)], "repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
    ),
    "sequence bias": (
        {"logit_bias": {5: 2.0, 40: -4.0, 17: 3.5}},
        {"sequence_bias": {(5,): 2.0, (40,): -4.0, (17,): 3.5}},
    ),
    "forced end": ({"forced_tokens": {23: 9}, "stop_token_ids": (9,)}, {"forced_eos_token_id": 9, "eos_token_id": 9}),
    "minimum": ({"min_new_tokens": 15, "stop_token_ids": (9, 12)}, {"min_new_tokens": 15, "eos_token_id": [9, 12]}),
    "together": (
        {"repetition_penalty": 1.3, "banned_token_ids": (7,), "logit_bias": {5: 2.0}},
        {"repetition_penalty": 1.3, "bad_words_ids": [[7]], "sequence_bias": {(5,): 2.0}},
    ),
}


@pytest.mark.parametrize("name", list(PROCESSORS))
def test_greedy_text_is_that_of_transformers_processors(name: str) -> None:
    ours, theirs = PROCESSORS[name]
    lengths, new = (1, 5, 17, 40), 24
    prompts = [models.prompt(length) for length in lengths]
    want, plain = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
        want.append(models.untouched("llama").generate(ids, **options, **theirs)[0, len(prompt) :].tolist())
        ends = {key: value for key, value in theirs.items() if key == "eos_token_id"}
        plain.append(models.untouched("llama").generate(ids, **options, **ends)[0, len(prompt) :].tolist())
    assert want != plain, "the processor does nothing here: the test would prove little"
    params = SamplingParams(temperature=0, max_new_tokens=new, **ours)
    texts = [[*prompt, *text] for prompt, text in zip(prompts, want, strict=True)]
    small = HuggingFaceTarget(models.kin("llama"), max_length=320, max_rows=4)
    for made in (
        None,
        NoisyChain(texts, 0.8, 96, num_draft_tokens=5),
        NoisyTree(texts, 0.8, 96, num_draft_tokens=9),
        get_drafter("draft_model")(small, num_draft_tokens=4),
    ):
        engine = Engine(models.target("llama", max_rows=4), made)
        assert [handle.tokens for handle in engine.generate(prompts, params)] == want, (name, made)
