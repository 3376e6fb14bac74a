"""Target and draft of different dtypes and vocabulary sizes: every combination runs, and replay holds."""

from __future__ import annotations

import pytest
import torch
from oracles import models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter


def target(dtype: torch.dtype, vocab_size: int | None, noise: float | None = None) -> HuggingFaceTarget:
    model = models.own("llama") if noise is None else models.kin("llama", noise)
    return HuggingFaceTarget(model.to(dtype), max_length=96, vocab_size=vocab_size)


@pytest.mark.parametrize("vocab_size", [None, 90])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_combinations_of_dtypes(ours: torch.dtype, theirs: torch.dtype, vocab_size: int | None) -> None:
    prompts = [models.prompt(length, vocab=90) for length in (5, 17, 40)]
    params = [SamplingParams(seed=seed, max_new_tokens=12, top_p=0.95) for seed in range(3)]
    plain = Engine(target(ours, vocab_size)).generate(prompts, params)
    for rule, pick in (("replay", "coupled"), ("rejection", "sampled"), ("rejection", "coupled")):
        draft = get_drafter("draft_model")(target(theirs, vocab_size, noise=0.1), pick=pick, vocab_size=vocab_size)
        engine = Engine(target(ours, vocab_size), draft, rule=rule)
        handles = engine.generate(prompts, params)
        assert [handle.error for handle in handles] == [None] * 3
        assert all(max(handle.tokens) < (vocab_size or 96) for handle in handles)
        assert engine.stats.alpha > 0.1
        if rule == "replay":
            assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain]
