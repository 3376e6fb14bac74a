"""Rates of recurrent heads by rank and depth: against drafting place by place, and against walks written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models

from specdec_fast import Engine, SamplingParams
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.draft import Draft
from specdec_fast.drafters import make_drafter
from specdec_fast.tune.recurrent_head_acceptance import measure_recurrent, rates_of_walks

WIDTH, DEPTH = 30, 3


def test_a_walk_ends_where_the_token_is_none_of_the_choices() -> None:
    walks = [[0, 1, 0], [1, -1, 0], [-1, 0, 0], [0, 0]]
    assert rates_of_walks(walks, 2, 4) == [[0.5, 0.25], [1 / 3, 1 / 3], [1.0, 0.0]]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
@torch.inference_mode()
def test_rates_are_those_of_drafting_from_every_root(name: str, tmp_path: Path) -> None:
    """Scores the text itself as a chain behind keys from true features, root by root."""
    target = models.target("llama", max_rows=2)
    drafter: Any = make_drafter(name, heads.options(name, tmp_path), target=target)
    model, prompts = drafter.model, [models.prompt(9), models.prompt(1)]
    params = SamplingParams(temperature=0, seed=0, max_new_tokens=8)
    rates, tokens = measure_recurrent(target, model, prompts, params, width=WIDTH, depth=DEPTH)
    walks = []
    for prompt, handle in zip(prompts, Engine(target).generate(prompts, params), strict=True):
        text = [*prompt, *handle.tokens]
        assert target.cache.reserve(0, len(text)) and model.cache.reserve(0, len(text) + DEPTH)
        shape = chain_layout((0,), (len(text),), torch.device("cpu"))
        aux_hidden_states = target.extend(
            shape.rows, torch.tensor(text), shape.offsets, logits=False, aux_hidden_states=model.aux_hidden_states
        ).aux_hidden_states
        features = model.features(aux_hidden_states)
        for root in range(max(len(prompt) - 1, 1), len(text) - 1):
            model.cache.rollback(torch.tensor([0], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))
            known = chain_layout((0,), (root,), torch.device("cpu"))
            hidden = model.extend(known.rows, torch.tensor(text[1 : root + 1]), features[:root], known.offsets)[-1:]
            fed, walk = hidden, []
            for depth in range(min(DEPTH, len(text) - 1 - root)):
                if depth:
                    hidden = model.score(Draft.chains([0], [text[root + 1 : root + 1 + depth]]), fed)[-1:]
                    fed = torch.cat([fed, hidden])
                logits = model.logits(hidden)[0]
                best = logits.topk(WIDTH).indices if model.token_ids is None else model.token_ids[logits.topk(WIDTH)[1]]
                token = text[root + 1 + depth]
                walk.append(best.tolist().index(token) if token in best else -1)
            walks.append(walk)
        target.cache.release([0])
        model.cache.release([0])
    assert tokens == 16 and len(walks) == 8 + 7 and rates == rates_of_walks(walks, WIDTH, DEPTH)
    assert any(rate for row in rates for rate in row), "no token of the text is among the choices"
    assert Engine(target, drafter).generate(prompts, params)[0].stats.num_draft_tokens > 0, "it drafts as before"
