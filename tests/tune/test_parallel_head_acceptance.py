"""Rates of heads by rank: counted again from texts and logits, and what an oracle gives."""

from __future__ import annotations

import torch
from oracles import models
from oracles.automaton import scripted

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.tune.parallel_head_acceptance import measure_heads

WIDE = (-1, 0, 0, 0, 1, 4)  # three ranks, three depths


def test_rates_are_counts_over_the_targets_own_text() -> None:
    target = models.target("llama", max_rows=2)
    heads = models.medusa_heads(target)
    drafter = get_drafter("medusa")(target, heads, shape=WIDE, pick="greedy")
    prompts = [models.prompt(17), models.prompt(1)]
    params = SamplingParams(temperature=0, seed=0, max_new_tokens=12)
    rates, tokens = measure_heads(target, drafter, prompts, params)
    hits, places = torch.zeros(3, 3), torch.zeros(3, 1)
    for prompt, handle in zip(prompts, Engine(target).generate(prompts, params), strict=True):
        text = [*prompt, *handle.tokens]
        with torch.no_grad():
            output = models.untouched("llama")(torch.tensor([text]), output_hidden_states=True)
            logits = heads(output.hidden_states[-1][0])
        for place in range(max(len(prompt) - 2, 0), len(text) - 2):
            for head in range(3):
                if place + 2 + head < len(text):
                    places[head] += 1
                    best = logits[head, place].topk(3).indices.tolist()
                    if text[place + 2 + head] in best:
                        hits[head, best.index(text[place + 2 + head])] += 1
    assert tokens == 24 and torch.allclose(torch.tensor(rates), hits / places)
    assert target.cache.pages.num_used == 0


def test_an_oracle_is_always_right() -> None:
    script = [(7 * at + 3) % 9 for at in range(40)]
    target = scripted(script, 9)
    heads = MedusaHeads(len(target.table), 9, 3, num_layers=0)
    assert heads.lm_head is not None
    with torch.no_grad():
        for head in range(3):
            heads.lm_head[head] = target.table[(torch.arange(41) + 1 + head).clamp(max=40)].T
    drafter = get_drafter("medusa")(target, heads, shape=WIDE, pick="coupled")
    rates, _ = measure_heads(target, drafter, [script[:4]], SamplingParams(temperature=0, seed=0, max_new_tokens=20))
    assert [row[0] for row in rates] == [1.0, 1.0, 1.0]
