"""Measured acceptance by rank and depth, against counts written out by hand and against trees in use."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.trees.static_shape import best_shape, expected_tokens
from specdec_fast.tune.draft_tree_acceptance import measure, ranks_of, rates_of


def test_rates_count_walks_from_every_token() -> None:
    rates = rates_of([[0, 1, -1, 0], [1]], width=2, depth=5)
    assert rates[0] == [2 / 5, 2 / 5]
    assert rates[1] == [0.0, 1 / 2]  # behind 0 comes 1, behind 1 nothing known; behind -1 no walk
    assert rates[2] == [0.0, 0.0] and len(rates) == 3


@pytest.mark.parametrize("how", ["coupled", "top_k"])
def test_the_ranks_of_a_draft_that_is_the_target(how: str) -> None:
    """Coupled, it is always the first; by the distribution, the place of the token among the sorted logits."""
    model, twin = (AutomatonTarget(random_logits(23, 8, seed=2)) for _ in range(2))
    params = SamplingParams(seed=5, max_new_tokens=30, temperature=0.8)
    text = Engine(model).generate([[1, 2]], params)[0].tokens
    ranks = ranks_of(twin, [1, 2], text, params, how, 8, 8)
    order = [np.argsort(-model.logits_after([1, 2, *text[:at]]), kind="stable").tolist() for at in range(30)]
    assert ranks == [0 if how == "coupled" else own.index(token) for own, token in zip(order, text, strict=True)]
    short = ranks_of(twin, [1, 2], text, params, how, 2, 8)
    assert short == [rank if rank < 2 else -1 for rank in ranks]
    assert twin.cache.pages.num_used == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_yields_the_expected_tokens(temperature: float) -> None:
    """Rates from some texts, tokens per step on others; and no worse than widths of the same size."""
    target = models.target("llama", max_rows=8)
    draft = HuggingFaceTarget(models.kin("llama", noise=0.3), max_rows=8, max_length=320)
    prompts = [models.prompt(length) for length in (5, 17, 40, 6, 9, 23, 30, 12)]
    params = SamplingParams(temperature=temperature, seed=100, max_new_tokens=60)
    rates, tokens = measure(target, draft, prompts, params, width=5, depth=6)
    assert tokens == 8 * 60 and all(sum(row) <= 1 + 1e-9 for row in rates)
    shape = best_shape(rates, 9)
    taus = {}
    for name, options in (("best", {"shape": shape.parents}), ("widths", {"widths": (3, 2)})):
        engine = Engine(target, get_drafter("draft_tree")(draft, **options))
        engine.generate(
            prompts, [SamplingParams(temperature=temperature, seed=at, max_new_tokens=60) for at in range(8)]
        )
        taus[name] = engine.stats.tau
    assert abs(taus["best"] - expected_tokens(shape, rates)) < 0.35 and taus["best"] > taus["widths"] - 0.1


def test_what_cannot_be_measured_is_named() -> None:
    model = AutomatonTarget(random_logits(23, 8, seed=2))
    with pytest.raises(ValueError, match="tune tree how: got 'best'; expected one of coupled, top_k"):
        measure(model, model, [[1]], SamplingParams(), how="best")
    small = AutomatonTarget(random_logits(23, 8, seed=2), max_length=4)
    with pytest.raises(ValueError, match="tune tree: got no text to measure on"):
        measure(model, small, [[1]], SamplingParams(max_new_tokens=9))
    dry = AutomatonTarget(random_logits(23, 8, seed=2), num_pages=2)
    with pytest.raises(ValueError, match=r"tune tree: a text of 40 tokens has no room .*raise num_pages"):
        ranks_of(dry, [1] * 20, [2] * 20, SamplingParams(seed=1), "top_k", 2, 8)
