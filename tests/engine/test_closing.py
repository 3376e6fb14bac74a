"""The end of an engine: requests end, models are given back, and nothing runs any more."""

from __future__ import annotations

import gc

import pytest
from oracles import models

from specdec_fast import SamplingParams, load

PARAMS = SamplingParams(temperature=0, max_new_tokens=20)


def test_a_closed_engine_gives_both_models_back() -> None:
    model, draft = models.own("llama"), models.kin("llama")
    before = models.own_text(model), models.own_text(draft)
    with load(model, draft, max_length=64, max_rows=2) as engine:
        assert engine.generate([models.prompt(17)], PARAMS)[0].error is None
        assert not engine.closed and model.config._attn_implementation == "specdec_paged"
    assert engine.closed and (models.own_text(model), models.own_text(draft)) == before
    engine.close()


@pytest.mark.parametrize("drafter", ["draft_model", "draft_tree", "forest"])
def test_every_draft_model_is_given_back(drafter: str) -> None:
    options = {"of": {"draft_model": {}, "draft_tree": {"widths": [2, 1]}}} if drafter == "forest" else {}
    draft = models.kin("llama")
    before = models.own_text(draft)
    load(models.own("llama"), draft, drafter=drafter, drafter_options=options, max_length=64).close()
    assert models.own_text(draft) == before


def test_requests_of_a_closed_engine_end() -> None:
    engine = load(models.own("llama"), max_length=64, max_rows=1, eos_token_ids=())
    running, queued = engine.submit(models.prompt(17), PARAMS), engine.submit(models.prompt(18), PARAMS)
    engine.step()
    engine.close()
    assert running.finish_reason == queued.finish_reason == "cancelled" and len(running.tokens) == 1 and engine.idle
    assert engine.step() == []
    for call in (lambda: engine.submit([1, 2], PARAMS), engine.warm):
        with pytest.raises(ValueError, match="engine: it is closed, and its models are given back; load another one"):
            call()
    refused = engine.generate([[1, 2]], PARAMS)[0]
    assert refused.finish_reason == "error" and "closed" in str(refused.error)


def test_a_model_serves_one_engine_after_another() -> None:
    model, texts = models.own("llama"), []
    for _ in range(2):
        with load(model, max_length=64, eos_token_ids=()) as engine:
            texts.append(engine.generate([models.prompt(17)], PARAMS)[0].tokens)
    assert texts[0] == texts[1] == models.greedy_text("llama", 17, 20)


def test_an_engine_that_nothing_refers_to_gives_its_models_back() -> None:
    model, draft = models.own("llama"), models.kin("llama")
    before = models.own_text(model), models.own_text(draft)
    engine = load(model, draft, max_length=64)
    engine.generate([models.prompt(17)], PARAMS)
    del engine
    gc.collect()
    assert (models.own_text(model), models.own_text(draft)) == before


def test_every_call_is_made_even_if_one_raises() -> None:
    engine, made = load(models.own("llama"), max_length=64), []
    engine.on_close(lambda: made.append("first"))
    engine.on_close(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.close()
    assert made == ["first"] and engine.closed and engine.target.model.config._attn_implementation != "specdec_paged"
