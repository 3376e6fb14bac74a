"""Too little memory, too many requests, requests that leave: texts do not change, and every page is freed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.noisy_oracle import NoisyChain, NoisyTree

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter

VOCAB = 8


def target(**shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, VOCAB, seed=2), **shape)


def small(rows: int, **shape: int) -> AutomatonTarget:
    close = random_logits(23, VOCAB, seed=2) + 0.5 * random_logits(23, VOCAB, seed=3)
    return AutomatonTarget(close, max_rows=rows, **shape)


def requests(count: int, longest: int = 40, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    source = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [source.randrange(VOCAB) for _ in range(source.randrange(1, 10))]
        temperature = source.choice([0.0, 1.0])
        made.append(
            (
                prompt,
                SamplingParams(seed=number, max_new_tokens=source.randrange(1, longest), temperature=temperature),
            )
        )
    return made


def texts_alone(wanted: list[tuple[list[int], SamplingParams]], ends: tuple[int, ...] = ()) -> list[list[int]]:
    roomy = Engine(target(max_rows=64, max_length=64), eos_token_ids=ends)
    return [h.tokens for h in roomy.generate([prompt for prompt, _ in wanted], [params for _, params in wanted])]


def drafter(kind: str, rows: int, texts: list[list[int]]) -> Any:
    if kind == "none":
        return None
    if kind == "ngram":
        return get_drafter("ngram")(num_draft_tokens=6, n_min=1)
    if kind == "draft_model":
        return get_drafter("draft_model")(small(rows, num_pages=30), num_draft_tokens=4)
    return {"chain": NoisyChain, "tree": NoisyTree}[kind](texts, 0.8, VOCAB, num_draft_tokens=7)


def nothing_is_held(engine: Engine) -> None:
    assert engine.idle
    assert engine.target.cache.pages.num_used == 0
    assert engine.target.cache.lengths.sum() == 0 and engine.target.cache.page_table.sum() == 0
    assert engine.state.num_free == engine.target.cache.max_rows
    model = getattr(engine.drafter, "model", None)
    if model is not None:
        assert model.cache.pages.num_used == 0 and engine.drafter._runner._stored == {}
    for name in ("_rows", "known"):
        assert not getattr(engine.drafter, name, {})


@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model", "chain", "tree"])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 60), (4, 16), (16, 5)])
def test_rows_are_evicted_and_recomputed_without_a_trace(kind: str, page_size: int, num_pages: int) -> None:
    wanted = requests(30)
    want = texts_alone(wanted)
    texts = [[*prompt, *text] for (prompt, _), text in zip(wanted, want, strict=True)]
    engine = Engine(target(max_rows=6, num_pages=num_pages, page_size=page_size), drafter(kind, 6, texts))
    handles = engine.generate([prompt for prompt, _ in wanted], [params for _, params in wanted])
    assert [handle.tokens for handle in handles] == want
    assert engine.stats.preemptions >= 3, "the pool was not tight enough for this test"
    assert engine.stats.new_tokens == sum(map(len, want))
    nothing_is_held(engine)


@pytest.mark.parametrize("kind", ["none", "draft_model", "tree"])
@pytest.mark.parametrize("mode", ["sync", "graph"])
def test_steps_of_some_requests_leave_the_others_waiting(kind: str, mode: str) -> None:
    wanted = requests(12)
    want, source = texts_alone(wanted), random.Random(5)
    texts = [[*prompt, *text] for (prompt, _), text in zip(wanted, want, strict=True)]
    engine = Engine(target(max_rows=6), drafter(kind, 6, texts), step_mode="graph" if mode == "graph" else "sync")
    handles = [engine.submit(*each) for each in wanted]
    while not engine.idle:
        only = set(source.sample(handles, source.randrange(7))) if source.random() < 0.5 else None
        before = {handle: len(handle.tokens) for handle in handles}
        engine.step(only)
        if only is not None and mode == "sync":
            assert all(handle in only for handle in engine._running.values())
            assert all(len(handle.tokens) == before[handle] for handle in handles if handle not in only)
    assert [handle.tokens for handle in handles] == want
    nothing_is_held(engine)


def test_a_real_model_recomputes_what_was_evicted() -> None:
    prompts = [models.prompt(length) for length in (17, 40, 5, 40)]
    want = [models.greedy_text("llama", length, 40) for length in (17, 40, 5, 40)]
    drafting = get_drafter("draft_model")(HuggingFaceTarget(models.kin("llama"), max_length=320), num_draft_tokens=3)
    engine = Engine(models.target("llama", num_pages=13), drafting)
    handles = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=40))
    assert [handle.tokens for handle in handles] == want
    assert engine.stats.preemptions >= 1
    nothing_is_held(engine)


def test_the_oldest_request_is_never_evicted() -> None:
    engine = Engine(target(max_rows=6, num_pages=16, page_size=4))
    handles = [engine.submit([1, 2], SamplingParams(seed=seed, max_new_tokens=50)) for seed in range(6)]
    while not engine.idle:
        engine.step()
    assert handles[0].stats.preemptions == 0 and handles[0].stats.steps == 50
    assert sum(handle.stats.preemptions for handle in handles) > 0
    assert all(len(handle.tokens) == 50 for handle in handles)


def test_a_request_that_was_evicted_and_then_cancelled_is_counted() -> None:
    engine = Engine(target(max_rows=3, num_pages=12, page_size=4))
    handles = [engine.submit([1, 2], SamplingParams(seed=seed, max_new_tokens=40)) for seed in range(3)]
    while not any(handle.stats.preemptions for handle in handles):
        engine.step()
    victim = next(handle for handle in handles if handle.stats.preemptions)
    assert victim.row is None and victim.tokens
    engine.cancel(victim)
    while not engine.idle:
        engine.step()
    assert engine.stats.new_tokens == sum(len(handle.tokens) for handle in handles)
    nothing_is_held(engine)


def test_requests_wait_for_pages_in_their_order() -> None:
    """Later requests do not overtake a long prompt at the head of the queue."""
    engine = Engine(target(max_rows=4, num_pages=12, page_size=4))
    first = engine.submit([1] * 30, SamplingParams(seed=0, max_new_tokens=8))
    long = engine.submit([2] * 30, SamplingParams(seed=1, max_new_tokens=4))
    short = engine.submit([3], SamplingParams(seed=2, max_new_tokens=4))
    engine.step()
    assert engine.num_running == 1 and engine.num_queued == 2
    while not engine.idle:
        engine.step()
        if not long.tokens:
            assert not short.tokens
    assert (len(first.tokens), len(long.tokens), len(short.tokens)) == (8, 4, 4)


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "tree"])
def test_a_thousand_requests_leak_nothing(kind: str) -> None:
    """Random arrivals, budgets, ends and cancellations, in a pool that is too small."""
    source = random.Random(kind)
    wanted = requests(1000, longest=14, seed=7)
    ends = (3,)
    want = texts_alone(wanted, ends)
    texts = [[*prompt, *text] for (prompt, _), text in zip(wanted, want, strict=True)]
    proposer = drafter(kind, 8, texts[:20])
    engine = Engine(target(max_rows=8, num_pages=10, page_size=4), proposer, eos_token_ids=ends)
    waiting, open_handles, cancelled = list(range(len(wanted))), {}, set()
    while waiting or not engine.idle:
        for _ in range(source.randrange(4)):
            if waiting:
                at = waiting.pop()
                budget = source.choice([None, None, 0, 2])
                open_handles[at] = engine.submit(*wanted[at], num_draft_tokens=budget)
        if source.random() < 0.2:
            alive = [at for at, handle in open_handles.items() if not handle.finished]
            if alive:
                cancelled.add(source.choice(alive))
                for at in cancelled:
                    engine.cancel(open_handles[at])
        engine.step()
        held = sum(len(owned) for owned in engine.target.cache._owned)
        assert engine.target.cache.pages.num_used == held
    for at, handle in open_handles.items():
        if handle.finish_reason == "cancelled":
            assert handle.tokens == want[at][: len(handle.tokens)]
        else:
            assert handle.tokens == want[at]
    assert engine.stats.preemptions >= 8 and len(cancelled) > 10
    nothing_is_held(engine)
