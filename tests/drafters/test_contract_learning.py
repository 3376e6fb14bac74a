"""A request's drafts depend on its own steps only: alone or in a batch, first or later, drafts and acceptance are
equal.

Run for every variant of the contract suite, and for an adaptive entropy stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafters.test_contract import LEARNS_FROM_RESULTS, VARIANTS, close_model, target
from oracles.head_drafts import begin

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.engine.state import DecodeState
from specdec_fast.engine.sub_batch import select_step_rows
from specdec_fast.interfaces import Acceptance, Budget, Rng, StateView, TargetOutput

TEXTS = [[1, 2, 1, 2, 5, 1, 2], [4], [7, 3, 7, 3, 7, 3, 6, 0, 7, 3], [0, 5]]
PARAMS = [
    SamplingParams(seed=seed, temperature=temperature, max_new_tokens=limit)
    for seed, (temperature, limit) in enumerate([(0.0, 17), (0.8, 7), (1.0, 12), (0.0, 15)])
]
EVERYONE = tuple(range(len(TEXTS)))
# Variants whose requests learn from each other on purpose. Adaptive forests do so too, since a request with few steps
# uses the acceptance of all. Those of the contract suite share their budget evenly. `auto` keeps one acceptance
# per level of confidence, over all requests.
SHARED = {"auto-coupled", "auto-greedy", "recycling-prompts", "recycling-shared", "suffix-shared"}
MOVING = {"pick": "sampled", "entropy_stop": 0.45, "entropy_goal": 0.6}
OWN = [
    *(each for each in VARIANTS if each.id not in SHARED),
    pytest.param(lambda: get_drafter("draft_model")(close_model(), **MOVING), id="draft_model-moving"),
]
for_each_own = pytest.mark.parametrize("build", OWN)

Story = tuple[int, int, tuple[int, ...], list[list[int]]]


def stories(engine: Engine, places: Sequence[int] = EVERYONE) -> list[Story]:
    """Returns for each request: steps, draft nodes, accepted ones by depth, and draft nodes of each step."""
    made: Any = engine.drafter
    propose, drafts = made.propose, {}

    def watched(view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Any:
        draft = propose(view, rows, budget, rng)
        tokens, bounds = draft.tokens.tolist(), draft.offsets.tolist()
        for row, start, stop in zip(rows, bounds, bounds[1:]):
            if stop - start > 1:
                drafts.setdefault(engine._running[row].request_id, []).append(tokens[start:stop])
        return draft

    made.propose = watched
    handles = engine.generate([TEXTS[at] for at in places], [PARAMS[at] for at in places])
    made.propose = propose
    return [
        (
            own.stats.steps,
            own.stats.num_draft_tokens,
            tuple(own.stats.accepted_per_position),
            drafts.get(own.request_id, []),
        )
        for own in handles
    ]


def test_drafters_that_share_declare_it() -> None:
    found = {each.id: each.values[0]() for each in VARIANTS if each.id in SHARED}
    assert found.keys() == SHARED
    shares = {name for name, made in found.items() if getattr(made, "shared", False) or getattr(made, "memory", None)}
    assert {name for name in found if name not in shares} <= {"auto-coupled", "auto-greedy", "suffix-shared"}
    assert found["suffix-shared"].memory is not None
    assert {each.id for each in VARIANTS if each.values[0]().needs.cross_request} == SHARED, "uniforms are keyed by it"


@for_each_own
def test_a_request_learns_from_its_own_steps_alone(build: Callable[[], Any]) -> None:
    """Compares a ragged batch with each of its requests alone, and with the same batch again on the same engine."""
    engine = Engine(target(), build())
    together = stories(engine)
    assert sum(drafted for _, drafted, _, _ in together) > 20
    assert [stories(Engine(target(), build()), [at])[0] for at in EVERYONE] == together
    assert stories(engine) == together


@for_each_own
def test_no_data_of_observed_requests_is_left(build: Callable[[], Any]) -> None:
    """After others ran on the same rows, one of them cancelled, the drafter behaves as a fresh one and holds no more
    data.
    """
    made, fresh = build(), build()
    engine = Engine(target(), made)
    others = [engine.submit([*text, 6, 6], params) for text, params in zip(reversed(TEXTS), PARAMS, strict=True)]
    for _ in range(4):
        engine.step()
    engine.cancel(others[0])
    while not engine.idle:
        engine.step()
    for name, value in vars(made).items():
        if isinstance(value, (dict, set)):
            assert value == getattr(fresh, name), f"{name} still knows of rows that have left"
    for holder in (made, *getattr(made, "sources", ())):
        assert not hasattr(holder, "model") or holder.model.cache.pages.num_used == 0
    assert stories(engine) == stories(Engine(target(), fresh))


@pytest.mark.parametrize("build", [each for each in OWN if each.id.split("-")[0] in LEARNS_FROM_RESULTS])
def test_a_fresh_one_that_observes_one_row_proposes_the_same(build: Callable[[], Any]) -> None:
    """For drafters that learn from the target's results: proposals for a row depend on the steps of this row, and not
    on other rows or on its number.
    """
    engine, budgets, steps = Engine(target(), build()), [], []
    made: Any = engine.drafter
    proposes, observe = made.propose, made.observe

    def proposed(view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        budgets.append(budget.nodes)
        return proposes(view, rows, budget, rng)

    def observed(view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        steps.append((draft, acceptance, output, [list(view.tokens(row)) for row in draft.rows.tolist()]))
        observe(view, draft, acceptance, output)

    made.propose, made.observe = proposed, observed
    for text, params in zip(TEXTS, PARAMS, strict=True):
        engine.submit([*text, *text], replace(params, max_new_tokens=40))
    for _ in range(6):
        engine.step()
    assert any(count > 2 for draft, *_ in steps for count in draft.counts)
    for place in EVERYONE:
        text, params = [*TEXTS[place], *TEXTS[place]], PARAMS[place]
        state, fresh = DecodeState(1, 64), build()
        row = state.join(text, params, len(text), ())
        begin(fresh, target(), state, [row])
        for limits, (draft, acceptance, output, texts) in zip(budgets, steps, strict=True):
            part, own_acceptance, outputs = select_step_rows(draft, acceptance, output, [place])
            with torch.inference_mode():
                own = fresh.propose(state, [row], Budget([limits[place]]), state.rng([row]))
            assert own.tokens.tolist() == part.tokens.tolist() and own.parents.tolist() == part.parents.tolist()
            state.append([row], [texts[place][state.length(row) :]])
            fresh.observe(state, own, own_acceptance, outputs)
