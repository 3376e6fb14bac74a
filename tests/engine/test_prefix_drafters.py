"""Prefix sharing with every drafter over a tiny transformers model: texts, keys and values do not change."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters.test_contract_models import made, small, target
from oracles import models
from oracles.kv_recompute import recomputed

from specdec_fast import Engine, SamplingParams
from specdec_fast.drafters import drafter_names, takes_draft
from specdec_fast.targets.huggingface import HuggingFaceTarget

NEW = 12
ASKED = [
    SamplingParams(temperature=0.0, seed=1, max_new_tokens=NEW),
    SamplingParams(temperature=0.8, seed=2, max_new_tokens=NEW),
]


@functools.cache
def conversation(sampled: bool) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns prompts and texts of three turns, by plain decoding without sharing."""
    history, turns = [0, *models.prompt(36)], []
    for turn in range(3):
        own = ASKED[sampled]
        (handle,) = Engine(target("llama"), prefix_sharing=False).generate([history], own)
        turns.append((tuple(history), tuple(handle.tokens)))
        history = [*history, *handle.tokens, turn, *models.prompt(5)]
    return tuple(turns)


@pytest.mark.parametrize("name", drafter_names())
def test_turns_of_two_conversations_equal_plain_decoding(name: str, tmp_path: Path) -> None:
    """Each turn runs twice, so that one row shares pages with a row beside it and with the turn before."""
    engine = Engine(target("llama"), made(name, "llama", tmp_path))
    for turn in range(3):
        wanted = [conversation(sampled)[turn] for sampled in (False, True, False, True)]
        handles = engine.generate([list(prompt) for prompt, _ in wanted], [*ASKED, *ASKED])
        assert [tuple(handle.tokens) for handle in handles] == [text for _, text in wanted]
        assert all(handle.stats.cached_tokens >= 32 for handle in (handles if turn else handles[2:]))
        check_named_pages(engine.target.cache, [*(prompt + text for prompt, text in wanted)], models.untouched("llama"))
    assert engine.stats.faults == 0
    assert engine.target.cache.pages.num_used == 0
    if takes_draft(name):
        assert small("llama").cache.pages.num_used == 0 and small("llama").cache.pages.num_hits > 0


def check_named_pages(cache: Any, texts: list[tuple[int, ...]], model: Any) -> None:
    """Compares the named pages of texts with a recomputation."""
    for text in set(texts):
        pages = cache.pages.find(cache.page_names().upto(text, len(text)))
        assert pages, "nothing would be compared"
        for layer, (keys, values) in enumerate(recomputed(model, text[: len(pages) * cache.page_size])):
            assert torch.allclose(cache.keys[layer][pages].flatten(0, 1), keys, atol=2e-5, rtol=1e-4)
            assert torch.allclose(cache.values[layer][pages].flatten(0, 1), values, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_shared_keys_have_the_bits_of_those_that_are_computed(family: str, dtype: torch.dtype) -> None:
    """On a CPU, beyond windows too, whatever parts of a prompt a pass has."""
    prompt = models.prompt(150)
    cold, shared = (HuggingFaceTarget(models.own(family, dtype), max_rows=3, max_length=320) for _ in range(2))
    engines = [Engine(cold, prefix_sharing=False), Engine(shared, prefill_chunk=16)]
    engines[1].generate([prompt[:41], prompt[:20]], SamplingParams(max_new_tokens=3, temperature=0))
    handles = [engine.submit(prompt, SamplingParams(max_new_tokens=9, temperature=0)) for engine in engines]
    for engine, handle in zip(engines, handles):
        while not handle.tokens:
            engine.step()
    assert [handle.stats.cached_tokens for handle in handles] == [0, 32]
    rows = [handle.row for handle in handles]
    for layer in range(cold.num_layers):
        for one, other in zip(cold.cache.read(rows[0], layer), shared.cache.read(rows[1], layer)):
            assert one.shape[0] == 150 and torch.equal(one, other)
