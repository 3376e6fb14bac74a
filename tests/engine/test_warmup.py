"""`Engine.warm` leaves no trace: texts, statistics and caches are those of an engine that was not warmed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.engine.warmup import _rehearsal_engine

VOCAB = 9


def automaton(seed: int = 4, **shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(31, VOCAB, seed=seed), **shape)


def drafter_of(kind: str) -> Any:
    if kind == "none":
        return None
    if kind == "draft_model":
        return get_drafter(kind)(automaton(5, max_rows=4), num_draft_tokens=3)
    return get_drafter(kind)()


PARAMS = [SamplingParams(temperature=t, seed=at, max_new_tokens=12) for at, t in enumerate((0.0, 0.7, 1.0))]
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 7, 8]]


@pytest.mark.parametrize("mode", ["sync", "graph"])
@pytest.mark.parametrize("rule", ["replay", "recursive_rejection"])
@pytest.mark.parametrize("kind", ["none", "draft_model", "ngram", "suffix"])
def test_a_warmed_engine_equals_a_fresh_one(kind: str, rule: str, mode: str) -> None:
    made = []
    for warm in (False, True):
        engine = Engine(automaton(max_rows=4), drafter_of(kind), rule=rule, step_mode=mode, eos_token_ids=(3,))
        if warm:
            engine.warm()
            assert engine.idle and engine.target.cache.pages.num_used == 0
            assert engine.stats.steps == 0 and not any(engine.seconds.values())
            assert not engine.target.cache.lengths.any() and engine.state.num_free == 4
        handles = engine.generate(PROMPTS, PARAMS)
        made.append([(each.request_id, each.tokens, each.origins, each.stats.steps) for each in handles])
        assert engine.stats.faults == 0
    assert made[0] == made[1]


def test_running_requests_keep_their_rows_their_tokens_and_their_caches() -> None:
    engine = Engine(models.target("llama", max_rows=4, max_length=64), prefill_chunk=16)
    want = [handle.tokens for handle in engine.generate([models.prompt(5), models.prompt(17)], PARAMS[:2])]
    handles = [engine.submit(models.prompt(length), own) for length, own in zip((5, 17), PARAMS)]
    for _ in range(3):
        engine.step()
    cache, rows = engine.target.cache, [handle.row for handle in handles]
    before = [cache.read(row, 0) for row in rows]
    tokens = [list(handle.tokens) for handle in handles]
    steps = engine.stats.steps
    engine.warm([(4, 2), (1, 0)])
    assert [handle.row for handle in handles] == rows and [handle.tokens for handle in handles] == tokens
    assert engine.stats.steps == steps
    for row, (keys, values) in zip(rows, before, strict=True):
        assert torch.equal(cache.read(row, 0)[0], keys) and torch.equal(cache.read(row, 0)[1], values)
    while not engine.idle:
        engine.step()
    assert [handle.tokens for handle in handles] == want


def test_tokens_of_a_pending_step_are_reported_by_the_next_step() -> None:
    engine = Engine(automaton(max_rows=2), step_mode="graph")
    first = engine.submit([1], SamplingParams(seed=1, max_new_tokens=2))
    second = engine.submit([2], SamplingParams(seed=1, max_new_tokens=20))
    engine.step()
    engine.step()
    engine.warm([(1, 0)])
    assert first.finished and not second.finished
    assert {first, second} <= {*engine.step()}


def test_a_full_engine_warms_what_it_can() -> None:
    engine = Engine(automaton(max_rows=1, page_size=4, num_pages=9), step_mode="graph")
    handle = engine.submit([1, 2], SamplingParams(seed=1, max_new_tokens=9))
    engine.step()
    engine.warm()
    assert {capacity.all_greedy for capacity in engine._graph_runner.capacities} == {False, True}
    while not engine.idle:
        engine.step()
    assert handle.tokens == Engine(automaton()).generate([[1, 2]], handle.params)[0].tokens


def test_prepared_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_fast.engine.cuda_graph.runner.MAX_PROGRAMS", 1)
    engine = Engine(automaton(max_rows=4), drafter_of("draft_model"), step_mode="graph")
    engine.warm()
    prepared = {*engine._graph_runner.capacities}
    assert {(each.rows, each.nodes) for each in prepared} == {(rows, nodes) for rows in (1, 2, 4) for nodes in (1, 4)}
    engine.generate(PROMPTS, PARAMS)
    assert {*engine._graph_runner.capacities} == prepared
    for asked in (4, 5, 6):
        engine.generate([[1]], SamplingParams(seed=1, max_new_tokens=20), num_draft_tokens=asked)
    assert len({*engine._graph_runner.capacities} - prepared) == 1 and prepared <= {*engine._graph_runner.capacities}


@pytest.mark.parametrize("pair", [(0, 1), (5, 1), (1, -1)])
def test_impossible_capacities_are_refused(pair: tuple[int, int]) -> None:
    engine = Engine(automaton(max_rows=4))
    with pytest.raises(
        ValueError, match=rf"capacities: got \({pair[0]}, {pair[1]}\); expected 1..4 rows .max_rows of load., and 0"
    ):
        engine.warm([pair])


def test_a_compiled_target_is_compiled_by_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def keep(module: Any, _inputs: Any, **_options: Any) -> Any:
        graphs.append(module)
        return module

    compile = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda run, **options: compile(run, **{**options, "backend": keep}))
    target = HuggingFaceTarget(models.own("llama"), max_rows=1, max_length=32, compile=True)
    engine = Engine(target, rule="greedy", prefill_chunk=8)
    engine.warm()
    made = len(graphs)
    engine.generate([models.prompt(5), models.prompt(17)], PARAMS[0])
    assert made and len(graphs) == made


SHARED = {
    "target",
    "drafter",
    "needs",
    "rule",
    "why_rule",
    "why_drafter",
    "_cache",
    "_prefill_chunk",
    "state",
    "lock",
    "_is_inside_step",
} | {
    "default_params",
    "closed",
    "_closing",
}
"""What a rehearsal shares with its engine, which no step replaces or counts in."""


def test_a_rehearsal_shares_no_state_that_steps_write() -> None:
    """A new attribute of an engine is either replaced in the rehearsal's copy, or named here."""
    engine = Engine(automaton(max_rows=4), drafter_of("draft_model"), eos_token_ids=(3,))
    engine.tokenizer = object()
    copy = _rehearsal_engine(engine, [1], captured=False)
    assert {name for name, value in vars(engine).items() if vars(copy)[name] is value} == SHARED
