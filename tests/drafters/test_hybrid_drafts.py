"""Draft models with recurrent layers: their texts and what they store after rejections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import hybrid_models, models
from oracles.hybrid_models import Stepper, equal

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.cache.recurrent_states import LONGEST_HISTORY
from specdec_fast.drafters import make_drafter
from specdec_fast.targets.tiny_models import tiny_model

FAMILIES = ("qwen3_next", "bamba", "mamba", "lfm2")
PROMPTS = ([5, 6, 7, 8, 9, 3, 4], [11, 12, 13], [40, 41, 42], [1], [7, 7])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_drafts_for_itself(family: str) -> None:
    """A twin of the target drafts: nearly all greedy tokens are accepted, and texts are those of plain decoding."""
    target = HuggingFaceTarget(hybrid_models.model(family), max_rows=5)
    twin = HuggingFaceTarget(tiny_model(family), max_rows=5)
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    want = [list(each.tokens) for each in Engine(target).generate([list(each) for each in PROMPTS], params)]
    drafter = make_drafter("draft_model", {"num_draft_tokens": 4}, target=target, draft=lambda: twin)
    engine = Engine(target, drafter)
    assert [list(each.tokens) for each in engine.generate([list(each) for each in PROMPTS], params)] == want
    assert engine.stats.tau > 4, "the states of the draft are not those of its text"


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_with_rejections_are_those_of_plain_decoding(family: str) -> None:
    """Another model drafts, at temperatures at which tokens are rejected."""
    target = HuggingFaceTarget(models.own("llama"), max_rows=5, max_length=320)
    draft = HuggingFaceTarget(tiny_model(family, seed=3), max_rows=5)
    params = [SamplingParams(temperature=at * 0.4, seed=at, max_new_tokens=20, ignore_eos=True) for at in range(5)]
    want = [list(each.tokens) for each in Engine(target).generate([list(each) for each in PROMPTS], params)]
    engine = Engine(target, make_drafter("draft_model", {}, target=target, draft=lambda: draft))
    assert [list(each.tokens) for each in engine.generate([list(each) for each in PROMPTS], params)] == want


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_goes_back_by_its_records(family: str) -> None:
    """After each rollback the states are those of the remaining text, beside a row that goes back by another count."""
    target = HuggingFaceTarget(hybrid_models.model(family), max_rows=4)
    steps, cache = Stepper(target), target.cache
    cache.keep_history()
    try:
        for dropped in range(5):
            steps.start(0, [9, 8, 7])
            steps.start(1, [3])
            for token in (4, 5, 6, 7):
                steps.feed(0, [token])
                steps.feed(1, [token + 1])
            cache.rollback([0, 1], [7 - dropped, 5 - min(dropped, 1)])
            steps.follow(2, [9, 8, 7], [4, 5, 6, 7][: 4 - dropped]) if dropped < 4 else steps.start(2, [9, 8, 7])
            steps.follow(3, [3], [5, 6, 7, 8][: 4 - min(dropped, 1)])
            assert equal(steps.states(0), steps.states(2)) and equal(steps.states(1), steps.states(3))
            assert torch.equal(steps.feed(0, [1]), steps.feed(2, [1]))
            cache.rollback(torch.tensor([0], dtype=torch.int32), torch.tensor([7 - dropped], dtype=torch.int32))
            assert cache.rollback_point(0, 2) == 0, "only the last tokens have records"
    finally:
        target.close()


def test_a_long_text_is_not_read_again() -> None:
    """Rejections beyond the longest history cost a few tokens, not the prompt and all tokens behind it."""
    target = HuggingFaceTarget(models.own("llama"), max_rows=1, max_length=320)
    draft = HuggingFaceTarget(tiny_model("bamba", seed=3), max_rows=1)
    fed, extend = [], draft.extend

    def counting(rows: Any, tokens: Any, offsets: Any, **named: Any) -> Any:
        fed.append(len(tokens))
        return extend(rows, tokens, offsets, **named)

    draft.extend = counting  # type: ignore[method-assign]
    engine = Engine(target, make_drafter("draft_model", {"num_draft_tokens": 4}, target=target, draft=lambda: draft))
    prompt = models.prompt(100)
    engine.generate([prompt], [SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)])
    assert engine.stats.tau < 4, "the test needs rejections"
    assert fed[0] in (99, 100) and max(fed[1:]) <= 6, fed
    records = sum(each.offsets[-1] for each in draft.cache.recurrent._history)
    assert records <= 2 * LONGEST_HISTORY


def test_prompts_beside_each_other_leave_no_records() -> None:
    """A long prompt and a short one are read in one pass, which leaves no records; both rows go back afterwards."""
    target = HuggingFaceTarget(hybrid_models.model("bamba"), max_rows=4)
    steps, cache = Stepper(target), target.cache
    cache.keep_history()
    prompts = [models.prompt(100, 90), [3, 4, 5]]
    cache.release([0, 1, 2, 3])
    for row in (0, 1):
        assert cache.reserve(row, 128)
    bounds = torch.tensor([0, 100, 103], dtype=torch.int32)
    target.extend(hybrid_models.int32(0, 1), torch.tensor([*prompts[0], *prompts[1]]), bounds, logits=False)
    assert not cache.recurrent._history and cache.recurrent._bases[:2] == [100, 3]
    for row in (0, 1):
        for token in (7, 8, 9):
            steps.feed(row, [token])
    cache.rollback([0, 1], [101, 4])
    for row in (0, 1):
        cache.release([2])
        assert cache.reserve(2, 128)
        steps.feed(2, prompts[row])
        steps.feed(2, [7])
        assert equal(steps.states(row), steps.states(2))
    with pytest.raises(ValueError, match="expected 0, or 101 to 101"):
        cache.rollback([0], [99])
    target.close()
