"""Drafter `auto` drafts where none is named, unless it could change the text or not pay off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from oracles import models

from specdec_fast import SamplingParams, load
from specdec_fast.drafters import NO_DRAFTER
from specdec_fast.loading import engine_builder
from specdec_fast.rules import get_rule


def loaded(**options: Any) -> Any:
    return load(models.own("llama"), max_length=96, eos_token_ids=(), **options)


@pytest.mark.parametrize("rule", ["replay", "greedy", "best"])
def test_auto_drafts_by_default_and_says_so(rule: str) -> None:
    with loaded(rule=rule) as engine:
        assert engine.drafter.name == "auto"
        assert "\ndrafter auto: none was named, and no draft model was given\n" in engine.explain()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "replay: the default"),
        ({"rule": "greedy"}, "greedy: asked for by name"),
        ({"rule": get_rule("greedy")}, "greedy: passed as an object"),
    ],
)
def test_loaded_engines_say_where_their_rule_comes_from(options: dict[str, Any], why: str) -> None:
    with loaded(**options) as engine:
        assert engine.explain().startswith(f"rule {why}\n")


def test_the_text_is_that_of_plain_decoding() -> None:
    prompts = [[5, 6, 7] * 8, models.prompt(17)]
    params = [SamplingParams(temperature=t, seed=3, max_new_tokens=40) for t in (0.0, 0.8)]
    with loaded() as engine:
        drafted = [handle.tokens for handle in engine.generate(prompts, params)]
        assert engine.stats.num_draft_tokens > 0
    with loaded(drafter=NO_DRAFTER) as engine:
        assert engine.drafter is None and "\ndrafter none\n" in engine.explain()
        assert drafted == [handle.tokens for handle in engine.generate(prompts, params)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": "rejection"}, "rule rejection cannot verify the drafts of auto"),
        ({"rule": "recursive_rejection"}, "texts depend on the drafts under rule recursive_rejection"),
        ({"rule": "lossy"}, "texts depend on the drafts under rule lossy"),
        ({"budget": "goodput"}, "the budget goodput does too"),
        ({"step_mode": "graph"}, "neither compiled nor captured"),
        ({"compile": True}, "neither compiled nor captured"),
    ],
)
def test_where_drafts_could_change_the_text_or_do_not_pay_decoding_is_plain(
    options: dict[str, Any], words: str
) -> None:
    with loaded(**options) as engine:
        assert engine.drafter is None
        assert words in engine.explain(), engine.explain()


def test_a_gpu_decodes_plainly() -> None:
    target: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    policy = engine_builder.budget_for("fixed")
    rule = engine_builder.get_rule("replay")
    reason = engine_builder._why_not_by_default(target, rule, None, policy, "auto", False)
    assert reason is not None and "on a CPU only" in reason


def test_none_and_a_draft_model_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="got a draft model and drafter 'none'; expected only one"):
        load(models.own("llama"), models.kin("llama"), drafter=NO_DRAFTER, max_length=64)


def test_options_of_an_unnamed_drafter_are_refused() -> None:
    with pytest.raises(ValueError, match=r"drafter_options: got .* and no drafter"):
        loaded(drafter_options={"n_max": 3})
    with pytest.raises(ValueError, match="num_draft_tokens 4: got no drafter"):
        loaded(drafter=NO_DRAFTER, num_draft_tokens=4)
    assert loaded(num_draft_tokens=0).drafter is None
