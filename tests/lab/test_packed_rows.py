"""A packed row differs from a plain forward by rounding, up to a bound for the dtype, or it is a fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.planted_rules import AlteredRule

from specdec_fast.engine.engine import Engine
from specdec_fast.lab.draw_counts import Drawing
from specdec_fast.lab.greedy_texts import compare_greedy
from specdec_fast.lab.run import Lab
from specdec_fast.lab.text_positions import find_places
from specdec_fast.loading import load
from specdec_fast.rules import get_rule
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.targets.tiny_models import tiny_model

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3)
PROMPTS: Any = [("a", [5, 6, 7, 8]), ("b", [9, 3])]


def engine(rule: str, dtype: torch.dtype = torch.float32, std: float = 1.5) -> Engine:
    target, draft = (tiny_model("llama", logit_std=std, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        for ours, theirs in zip(draft.parameters(), target.parameters()):
            ours.lerp_(theirs, 0.95)
    return load(target.to(dtype), draft.to(dtype), rule=rule, num_draft_tokens=2, eos_token_ids=())


def unlikely(found: Any, draft: Any, dists: Any, rng: Any) -> Any:
    """Every step with drafts ends with the least likely token."""
    if draft.num_nodes == draft.num_rows:
        return found
    last = found.path.gather(1, found.num_accepted[:, None].long()).squeeze(1)
    return type(found)(found.path, found.num_accepted, dists.logits[last.long()].float().argmin(1))


def test_an_unlikely_token_is_no_tie_where_the_two_best_are_close() -> None:
    made = engine("greedy", torch.bfloat16, std=0.4)
    made.rule = AlteredRule(made.rule, acceptance=unlikely)
    found = compare_greedy(made, PROMPTS, (12,))
    assert not any(each.identical or each.holds for each in found)
    assert all(each.gap is not None and each.gap > each.allowed for each in found)


def test_draws_in_half_precision_are_judged_by_the_row_that_was_verified(tmp_path: Path) -> None:
    """Its rounding is no fault of the rule."""
    lab = Lab(tmp_path)
    lab.run_draws(engine("rejection", torch.bfloat16), PROMPTS, PARAMS, 20_000)
    assert lab.drawings and lab.failures == []
    here = lab.drawings[0].place
    assert 1e-3 < here.row_error < here.allowed == 0.5
    lab.drawings[0].place = replace(here, row_error=0.6)
    assert lab.failures == [f"packed row: {here.name}: a logit 0.6 from that of a plain forward, allowed 0.5"]
    assert lab.as_dict()["places"][0]["row_error_allowed"] == 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_saw_another_text_is_a_fault(dtype: torch.dtype, temperature: float) -> None:
    """What is cached of a page is that of its first token."""
    made = engine("rejection", dtype)
    params = replace(PARAMS, temperature=temperature)
    assert all(place.holds for place in find_places(made, PROMPTS[:1], params).places)
    score = made.target.score

    def stale(draft: Any, plan: Any, aux_hidden_states: Any = ()) -> Any:
        for pages in (*made.target.cache.keys, *made.target.cache.values):
            pages[:, 1:] = pages[:, :1]
        return score(draft, plan, aux_hidden_states)

    made.target.score = stale  # type: ignore[method-assign]
    found = find_places(made, PROMPTS[:1], params).places
    assert found and not any(place.holds for place in found)


def test_a_rejection_by_rounding_is_no_impossible_one() -> None:
    """A draft that is the target: what the packed row differs by is what may be rejected."""
    made = engine("rejection")
    place = find_places(made, PROMPTS, PARAMS).places[0]
    nearly = place.base * (1 + 1e-7 * torch.linspace(-1, 1, len(place.base)).numpy())
    drawing = Drawing(replace(place, q=place.p, draft=nearly / nearly.sum()), get_rule("rejection"), 0)
    drawing.run(20_000)
    assert drawing.counts.accepted.sum() == 20_000
    drawing.counts.accepted[int(place.base.argmax())] -= 1
    drawing.counts.recovered[int(place.base.argmax())] += 1
    assert all(test.p_value > 1e-6 for test in drawing.tests())


def test_a_run_without_a_place_to_draw_at_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lab: nothing to draw at any place; take another --pick: .*left out"):
        Lab(tmp_path).run_draws(engine("traversal"), PROMPTS, replace(PARAMS, top_k=1), 1000, "hybrid")
