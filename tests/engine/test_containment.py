"""A drafter or budget that fails once changes no text, and has no effect on other requests."""

from __future__ import annotations

from typing import Any

import pytest
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.noisy_oracle import NoisyTree

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.adaptive.budget import Fixed, Goodput
from specdec_fast.adaptive.cost_model import DraftOutcome
from specdec_fast.core.draft import Draft

PROMPTS = [models.prompt(17), models.prompt(9)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=24)


def tiny() -> HuggingFaceTarget:
    return HuggingFaceTarget(models.own("llama"), max_length=96, max_rows=4)


def automaton(sharp: float = 1.0) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, 8, seed=2) * sharp, max_length=200, page_size=4)


def failing(method: Any, at: int) -> Any:
    """Returns the method, which raises at its call number `at`."""
    calls = 0

    def wrapped(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("one bad moment")
        return method(*arguments, **more)

    return wrapped


@pytest.mark.parametrize("verb", ["propose", "observe"])
def test_the_target_s_cache_survives_a_drafter_that_uses_it(verb: str, faults: list[str]) -> None:
    want = [handle.tokens for handle in Engine(tiny()).generate(PROMPTS, GREEDY)]
    target = tiny()
    drafter = get_drafter("layer_skip")(target, num_draft_tokens=3)
    setattr(drafter, verb, failing(getattr(drafter, verb), 3))
    handles = Engine(target, drafter).generate(PROMPTS, GREEDY)
    assert [handle.tokens for handle in handles] == want and len(faults) == 1
    assert target.cache.pages.num_used == 0


def test_one_source_of_a_forest_fails_beside_another_that_uses_the_target(faults: list[str]) -> None:
    want = [handle.tokens for handle in Engine(tiny()).generate(PROMPTS, GREEDY)]
    target, ngram = tiny(), get_drafter("ngram")(n_min=1)
    ngram.observe = failing(ngram.observe, 3)
    forest = get_drafter("forest")([ngram, get_drafter("layer_skip")(target, num_draft_tokens=3)])
    handles = Engine(target, forest).generate(PROMPTS, GREEDY)
    assert [handle.tokens for handle in handles] == want and len(faults) == 1
    assert target.cache.pages.num_used == 0


class Generous(Fixed):
    def nodes(self, rows: Any, most: Any) -> list[int]:
        return [limit + 6 for limit in most]


class Short(Fixed):
    def nodes(self, rows: Any, most: Any) -> list[int]:
        return list(most)[:-1]


@pytest.mark.parametrize("budget", [Generous(), Short()], ids=lambda budget: type(budget).__name__)
def test_a_budget_cannot_exceed_the_limits(budget: Fixed, faults: list[str]) -> None:
    prompts, params = [[1, 2, 1, 2, 1, 2], [3, 4, 3, 4, 3]], SamplingParams(seed=1, max_new_tokens=60)
    want = [handle.tokens for handle in Engine(automaton()).generate(prompts, params)]
    engine = Engine(automaton(), get_drafter("draft_model")(automaton()), budget=budget)
    handles = engine.generate(prompts, params)
    assert [handle.tokens for handle in handles] == want
    assert all(handle.stats.faults == 0 and handle.stats.tau > 3 for handle in handles)
    assert len(faults) == isinstance(budget, Short)


def test_a_draft_model_runner_recovers_its_positions(faults: list[str]) -> None:
    """If a draft pass raises after it has stored keys, later tokens still get the right positions."""
    model = tiny()
    drafter = get_drafter("draft_tree")(model, widths=(1, 1, 1))
    model._run = failing(model._run, 1)
    engine = Engine(tiny(), drafter)
    handles = [engine.submit(prompt, SamplingParams(seed=1, max_new_tokens=60)) for prompt in PROMPTS]
    while not engine.idle:
        engine.step()
        for row in engine._running:
            assert int(model.cache.lengths[row]) == drafter.source._stored[row][0]
    assert all(handle.stats.tau > 3.3 for handle in handles) and len(faults) == 1


@pytest.mark.parametrize("name", ["jacobi", "lookahead"])
def test_the_other_rows_continue_to_learn(name: str, faults: list[str]) -> None:
    def drafted(prompts: list[list[int]]) -> tuple[list[int], float]:
        drafter = get_drafter(name)()
        propose = drafter.propose

        def raises_at_times(view: Any, rows: Any, budget: Any, rng: Any) -> Any:
            if any(view.tokens(row)[0] == 7 for row in rows):
                raise OverflowError("seven")
            return propose(view, rows, budget, rng)

        drafter.propose = raises_at_times
        handle = Engine(automaton(3.0), drafter).generate(prompts, SamplingParams(seed=1, max_new_tokens=40))[0]
        return handle.tokens, handle.stats.tau

    assert drafted([[1, 2, 3]]) == drafted([[1, 2, 3], [7, 2]])
    assert len(faults) == 1


def test_a_forest_forgets_drafts_of_a_step_that_was_lost() -> None:
    class Skipping(Fixed):
        skip = False

        def nodes(self, rows: Any, most: Any) -> list[int]:
            return [0] * len(rows) if self.skip else list(most)

    budget, target = Skipping(), automaton()
    forest = get_drafter("forest")([get_drafter("draft_model")(automaton()), get_drafter("ngram")(n_min=1)])
    engine = Engine(target, forest, budget=budget)
    handles = [engine.submit(prompt, SamplingParams(seed=1, max_new_tokens=60)) for prompt in ([1, 2, 3], [1, 2])]
    step = 0
    while not engine.idle:
        step += 1
        target.before_pass = failing(lambda: None, 1) if step == 4 else None
        budget.skip = step == 5
        if step == 4:
            with pytest.raises(RuntimeError):
                engine.step()
        else:
            engine.step()
    assert all(handle.stats.faults == 0 and handle.error is None for handle in handles)


def test_score_only_are_neither_drafted_nor_tested() -> None:
    engine = Engine(automaton(3.0), get_drafter("lookahead")(guesses=0))
    (handle,) = engine.generate([[1, 2, 3]], SamplingParams(seed=1, max_new_tokens=30))
    assert handle.stats.num_draft_tokens == 0 and sum(handle.stats.tested) == 0
    assert set(handle.origins) <= {"bonus", "plain"}


def test_goodput_ends_its_measurement_while_rows_join_and_leave() -> None:
    budget = Goodput()
    for step in range(60):
        rows = [step % 3, (step + 1) % 3, (step + 2) % 3]
        budget.release([step % 3])
        limits = budget.nodes(rows, [4, 4, 4])
        outcomes = [DraftOutcome(limit, 0, limit) for limit in limits]
        budget.observe(rows, outcomes, 5.0 * max(limits), 1.0 + sum(limits))
    assert limits == [0, 0, 0], "nothing is ever accepted"


@pytest.mark.parametrize("always", [False, True])
def test_a_batch_that_fails_twice_without_a_bad_row_is_given_up(always: bool, faults: list[str]) -> None:
    """Each row alone is observed without an error. The fault is counted once, and all rows keep drafting."""

    class Crowded(NoisyTree):
        seen = 0

        def observe(self, view: Any, draft: Draft, acceptance: Any, output: Any) -> None:
            self.seen += draft.num_rows > 1
            if draft.num_rows > 1 and (always or self.seen % 2):
                raise OverflowError("too many rows")

    prompts, params = [[1], [2], [1, 2, 3]], SamplingParams(seed=3, max_new_tokens=14)
    want = [handle.tokens for handle in Engine(automaton()).generate(prompts, params)]
    drafter = Crowded([[*prompt, *text] for prompt, text in zip(prompts, want, strict=True)], 0.9, 8)
    handles = Engine(automaton(), drafter).generate(prompts, params)
    assert [handle.tokens for handle in handles] == want and len(faults) == 1
    assert all((handle.origins.count("plain") > 1) == always for handle in handles), "a last token needs no draft"
    assert all(handle.stats.faults == 2 if always else handle.stats.faults for handle in handles)
