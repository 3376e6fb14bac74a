"""A head or draft model that never drafts is counted and logged; a look-up that finds nothing is not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.drafters import make_drafter
from specdec_fast.engine.empty_drafts import EMPTY_STEPS
from specdec_fast.interfaces import Needs

GREEDY = SamplingParams(temperature=0, max_new_tokens=20)
LENGTHS = (5, 17)


class Silent:
    """A drafter that proposes `count` roots alone, or None, then one token in every step."""

    name = "silent"
    num_draft_tokens = 2

    def __init__(self, needs: Needs, count: int = 1000, roots: bool = True) -> None:
        self.needs, self.count, self.roots = needs, count, roots

    def begin(self, *_: Any) -> None: ...
    def observe(self, *_: Any) -> None: ...
    def release(self, *_: Any) -> None: ...

    def propose(self, view: Any, rows: Any, budget: Any, rng: Any) -> Draft | None:
        self.count -= 1
        if self.count >= 0 and not self.roots:
            return None
        tail = [7] if self.count < 0 else []
        return Draft.chains(
            rows, [[view.tokens(row)[-1], *(tail if limit else [])] for row, limit in zip(rows, budget.nodes)]
        )


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "specdec_fast")
    return lambda: [each.getMessage() for each in caplog.records if "drafted nothing" in each.getMessage()]


def run(drafter: Any, *lengths: int, params: SamplingParams = GREEDY, **options: Any) -> list[Any]:
    """Runs requests whose texts must be plain decoding's."""
    handles = Engine(models.target("llama"), drafter, **options).generate([models.prompt(n) for n in lengths], params)
    if params == GREEDY:
        assert [each.tokens for each in handles] == [models.greedy_text("llama", n, 20) for n in lengths]
    return handles


@pytest.mark.parametrize("roots", [True, False])
@pytest.mark.parametrize("needs", [Needs(own_cache=True), Needs(aux_hidden_states=("final_norm",))])
def test_a_silent_model_is_counted_once_per_request_and_logged_once(needs: Needs, roots: bool, warned: Any) -> None:
    handles = run(Silent(needs, roots=roots), *LENGTHS)
    assert [each.stats.faults for each in handles] == [1, 1]
    assert len(warned()) == 1 and "drafter silent drafted nothing in 8 steps" in warned()[0]


def test_short_requests_add_up(warned: Any) -> None:
    engine = Engine(models.target("llama"), Silent(Needs(own_cache=True)))
    params = SamplingParams(temperature=0, max_new_tokens=4)
    for _ in range(5):
        engine.generate([models.prompt(5)], params)
    assert engine.stats.faults >= 1 and len(warned()) == 1


@pytest.mark.parametrize("count", [1, EMPTY_STEPS - 1])
def test_a_drafter_that_begins_late_is_no_fault(count: int, warned: Any) -> None:
    assert run(Silent(Needs(own_cache=True), count), 5)[0].stats.faults == 0 and not warned()


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_look_up_that_finds_nothing_is_no_fault(name: str, warned: Any) -> None:
    drafter: Any = get_drafter(name)()
    drafter.propose = lambda view, rows, budget, rng: Draft.chains(rows, [[view.tokens(row)[-1]] for row in rows])
    assert run(drafter, 17)[0].stats.faults == 0 and not warned()


def test_no_budget_and_few_allowed_tokens_are_no_fault(warned: Any) -> None:
    engine = Engine(models.target("llama"), Silent(Needs(own_cache=True)))
    handle = engine.generate([models.prompt(5)], GREEDY, num_draft_tokens=0)[0]
    only = SamplingParams(temperature=0, max_new_tokens=20, allowed_token_ids=(90, 91))
    assert handle.stats.faults == run(Silent(Needs(own_cache=True)), 5, params=only)[0].stats.faults == 0
    assert not warned()


def broken(name: str, folder: Path, target: Any, **options: Any) -> Any:
    """A drafter whose head computes NaN, as after an overflow in half precision."""
    if name in models.HEADS:
        made = get_drafter(name)(target, models.HEADS[name](target))
        weight = made.heads.weight if name == "medusa" else made.heads.inner.weight
    else:
        made = make_drafter(name, {**heads.options(name, folder), **options}, target=target)
        weight = made.model.head.get_parameter(
            "layer.mlp.up_proj.weight" if name == "mtp" else "layers.0.mlp.up_proj.weight"
        )
    with torch.no_grad():
        weight.fill_(float("nan"))
    return made


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "medusa", "blockwise"])
def test_a_head_of_nan_is_named_and_counted(name: str, tmp_path: Path, faults: list[str]) -> None:
    target = models.target("llama")
    handles = Engine(target, broken(name, tmp_path, target)).generate([models.prompt(n) for n in LENGTHS], GREEDY)
    assert [each.tokens for each in handles] == [models.greedy_text("llama", n, 20) for n in LENGTHS]
    assert [(each.stats.faults, each.stats.num_draft_tokens) for each in handles] == [(1, 0)] * 2 and len(faults) == 1
    assert f"drafter {name} raised in propose: ValueError" in faults[0] and "logits that are not finite" in faults[0]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa", "blockwise"])
def test_a_head_of_nan_is_counted_in_cuda_graph_steps(name: str, tmp_path: Path, warned: Any) -> None:
    target = models.target("llama")
    engine = Engine(target, broken(name, tmp_path, target), step_mode="graph")
    handles = engine.generate([models.prompt(n) for n in LENGTHS], GREEDY)
    assert [each.tokens for each in handles] == [models.greedy_text("llama", n, 20) for n in LENGTHS]
    assert [each.stats.faults for each in handles] == [1, 1] and len(warned()) == 1


def test_hidden_states_that_the_target_does_not_return_are_named(tmp_path: Path, faults: list[str]) -> None:
    """As where layers that never run were taken for those of the text model."""
    target = models.target("llama")
    drafter: Any = make_drafter("eagle3", heads.options("eagle3", tmp_path), target=target)
    hook = target._hook_hidden_state
    target._hook_hidden_state = (  # type: ignore[method-assign]
        lambda name: torch.nn.Identity().register_forward_hook(lambda *_: None) if name == "entering:1" else hook(name)
    )
    handle = Engine(target, drafter).generate([models.prompt(17)], GREEDY)[0]
    assert handle.tokens == models.greedy_text("llama", 17, 20) and handle.stats.faults == 1
    assert "raised in begin: ValueError: eagle3 head: got no hidden state entering:1" in faults[0]
