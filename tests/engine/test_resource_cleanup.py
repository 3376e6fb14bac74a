"""Ended texts, dropped engines and interrupted calls have no effect on later requests."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.test_interrupts import breaking
from oracles.automaton import AutomatonTarget, random_logits
from oracles.automaton_head import AutomatonHead
from oracles.toy_grammar import counting

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.adaptive.budget import Fixed
from specdec_fast.cache import PagedCache, paged
from specdec_fast.cache.pages import PageAllocator
from specdec_fast.drafters.ngram import NgramDrafter
from specdec_fast.engine.cuda_graph import runner
from specdec_fast.engine.request import Handle
from specdec_fast.sampling import logits_processors

STATES, VOCAB, CPU = 23, 8, torch.device("cpu")


def target(**shape: Any) -> AutomatonTarget:
    return AutomatonTarget(random_logits(STATES, VOCAB, seed=2), **({"max_rows": 3, "max_length": 128} | shape))


def close() -> AutomatonTarget:
    """Returns a draft model that is often right."""
    near = random_logits(STATES, VOCAB, seed=2) + 0.4 * random_logits(STATES, VOCAB, seed=4)
    return AutomatonTarget(near, max_rows=3, max_length=128)


def params(seed: int, count: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_new_tokens=count, **more)


def is_plain(handle: Handle) -> bool:
    """Whether a text equals plain decoding on a fresh target."""
    (alone,) = Engine(target()).generate([list(handle.prompt)], handle.params)
    return (handle.tokens, handle.finish_reason) == (alone.tokens, alone.finish_reason)


def run_on(engine: Engine, error: type[BaseException]) -> int:
    """Steps until the engine is idle, and returns how many steps raised the error."""
    raised = 0
    for _ in range(300):
        if engine.idle:
            return raised
        try:
            engine.step()
        except error:
            raised += 1
    raise AssertionError("requests are left")


@pytest.mark.parametrize("prompt", [[3, 4, 5], [3] * 60])
def test_an_engine_that_is_dropped_leaves_a_clean_target(prompt: list[int]) -> None:
    shared = target(num_pages=40)
    first = Engine(shared)
    first.submit(prompt, params(9, 60))
    first.submit([2], params(8, 60))
    for _ in range(40):
        first.step()
    del first
    second = Engine(shared)
    handles = second.generate([[4]], params(1, 20))
    assert shared.cache.pages.num_used == 0
    handles += second.generate([[1, 2], [1] * 60, [4]], params(1, 20))
    assert all(map(is_plain, handles)) and shared.cache.pages.num_used == 0


def test_an_engine_in_a_reference_cycle_is_collected_too() -> None:
    """This happens after a caught exception: it holds its callers' frames, and one of them holds it."""
    shared = target()
    first: Any = Engine(shared)
    first.itself = first
    first.submit([1], params(9, 60))
    gc.disable()
    try:
        first.step()
        del first
        (handle,) = Engine(shared).generate([[1, 2]], params(1, 20))
    finally:
        gc.enable()
    assert is_plain(handle)


def test_an_engine_does_not_take_pages_that_others_hold() -> None:
    shared = target()
    shared.cache.reserve(2, 9)  # a user's own loop
    engine = Engine(shared)
    handle = engine.submit([1], params(1, 12))
    with pytest.raises(ValueError, match="whose pages another user holds"):
        engine.step()
    shared.cache.release([2])
    assert run_on(engine, ValueError) == 0 and is_plain(handle)


def test_engines_take_turns_on_a_target() -> None:
    shared = target()
    first, second = Engine(shared), Engine(shared)
    one, two = first.submit([1], params(1, 12)), second.submit([2, 3], params(2, 12))
    first.step()
    with pytest.raises(ValueError, match="whose pages another user holds; expected one engine at a time"):
        second.step()
    assert run_on(first, ValueError) == 0 and run_on(second, ValueError) == 0
    three = first.submit([4], params(3, 12))
    assert run_on(first, ValueError) == 0
    assert is_plain(one) and is_plain(two) and is_plain(three)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_graph_steps_whose_inputs_were_half_written(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier batch of the same shape runs again, with another request in it."""
    engine = Engine(target(max_rows=2), step_mode="graph")
    first, long = engine.submit([1], params(1, 3)), engine.submit([2, 3], params(2, 60))
    while not first.finished:
        engine.step()
    third = engine.submit([4], params(3, 60))  # in the row of the first request, but after the long one
    monkeypatch.setattr(runner, "upload_values", breaking(runner.upload_values, at, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.cancel(long)
    fourth = engine.submit([5, 5], params(4, 20))
    assert run_on(engine, KeyboardInterrupt) == 0
    assert is_plain(third) and is_plain(fourth)


@pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize(("owner", "name"), [(PageAllocator, "free"), (PagedCache, "release")])
def test_rows_whose_release_was_interrupted_are_reused(
    owner: type, name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target())
    short, long = engine.submit([1, 2], params(1, 6)), engine.submit([3], params(2, 40))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaking(getattr(owner, name), 1, KeyboardInterrupt(), late))
        with pytest.raises(KeyboardInterrupt):
            while True:
                engine.step()
    assert short.finished
    later = [engine.submit([4, 5, at], params(10 + at, 9)) for at in range(4)]
    assert run_on(engine, Exception) == 0
    assert all(map(is_plain, [short, long, *later]))


@pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize(("owner", "name"), [(PageAllocator, "free"), (PagedCache, "release")])
def test_pages_of_an_interrupted_release_are_freed(
    owner: type, name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request needs nearly all pages."""
    engine = Engine(target(num_pages=20, page_size=8))
    first = engine.submit([1] * 100, params(1, 20))
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, breaking(getattr(owner, name), 1, KeyboardInterrupt(), late))
        engine.cancel(first)
    handle = engine.submit([2] * 100, params(2, 20))
    assert run_on(engine, Exception) == 0 and is_plain(handle)
    assert engine.target.cache.pages.num_used == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("at", [3, 5, 8, 14])
@pytest.mark.parametrize("step_mode", ["sync", "graph"])
def test_pages_that_never_reached_the_table_are_not_owned(
    step_mode: str, at: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    engine = Engine(target(page_size=1), get_drafter("draft_model")(close(), num_draft_tokens=3), step_mode=step_mode)
    monkeypatch.setattr(paged, "upload_values", breaking(paged.upload_values, at, error()))
    handles = [engine.submit(prompt, params(3, 30)) for prompt in ([1], [2, 3], [1, 2, 3])]
    assert run_on(engine, error) + len(faults) == 1  # if it hit a drafter's row, that row continues without drafts
    assert all(map(is_plain, handles)) and engine.target.cache.pages.num_used == 0


@pytest.mark.parametrize("at", [4, 5, 6])
def test_counts_continue_after_memory_ran_out_once(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = AutomatonTarget(random_logits(7, 300, seed=1), max_length=256)
    asked = params(3, 100, repetition_penalty=1.3)
    (want,) = Engine(wide).generate([[1, 2, 3]], asked)
    engine = Engine(wide)
    handle = engine.submit([1, 2, 3], asked)
    engine.step()  # the first tables; the second ones fail
    monkeypatch.setattr(
        logits_processors.TokenCounts, "_zeros", breaking(logits_processors.TokenCounts._zeros, at - 3, MemoryError())
    )
    assert len(set(want.tokens)) > 64 and run_on(engine, MemoryError) == 1 and handle.tokens == want.tokens


@pytest.mark.parametrize("half", ["_places", "_counts"])
def test_counts_whose_row_was_half_removed(half: str) -> None:
    """The removal is interrupted between any two of its dictionaries."""
    counts = logits_processors.TokenCounts(CPU)

    class Broken(dict[int, Any]):
        def interrupted(self, *_: Any) -> None:
            raise KeyboardInterrupt

        pop = __delitem__ = interrupted  # type: ignore[assignment]

    counts.join(0, [3], [])
    counts.tables()
    counts.append(0, range(90))
    kept = getattr(counts, half)
    setattr(counts, half, Broken(kept))
    with pytest.raises(KeyboardInterrupt):
        counts.leave(0)
    setattr(counts, half, kept)
    counts.tables()
    counts.leave(0)
    counts.join(0, [5], [6])
    ids, times, sizes = counts.tables()
    assert sizes.tolist() == [2] and ids[0, :2].tolist() == [5, 6] and times[0, :2].tolist() == [0, 1]


class Faulty(Fixed):
    """A budget whose methods raise."""

    def observe(self, *_: Any) -> None:
        raise RuntimeError("observed")

    def release(self, *_: Any) -> None:
        raise RuntimeError("released")


def test_a_budget_that_raises_stops_no_request(faults: list[str]) -> None:
    drafts = close()
    engine = Engine(target(), get_drafter("draft_model")(drafts, num_draft_tokens=3), budget=Faulty())
    handles = engine.generate([[1], [1, 2]], params(1, 12))
    assert all(map(is_plain, handles)) and all(handle.stats.num_draft_tokens for handle in handles)
    assert drafts.cache.pages.num_used == 0
    assert [fault.split(":")[0] for fault in faults] == [
        "budget Faulty raised in observe",
        "budget Faulty raised in release",
    ]


def test_failures_of_budget_and_drafter_are_both_reported(faults: list[str]) -> None:
    ngram = get_drafter("ngram")(n_min=1)
    ngram.observe = breaking(ngram.observe, 2, RuntimeError())  # type: ignore[method-assign]
    (handle,) = Engine(target(), ngram, budget=Faulty()).generate([[1, 1, 1]], params(1, 12))
    assert is_plain(handle)
    assert [fault.split(":")[0] for fault in faults] == [
        "budget Faulty raised in observe",
        "drafter ngram raised in observe",
        "budget Faulty raised in release",
    ]


def test_a_source_of_a_forest_that_cannot_release_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    monkeypatch.setattr(NgramDrafter, "release", breaking(NgramDrafter.release, 1, RuntimeError()))
    drafts = close()
    sources = [get_drafter("ngram")(n_min=1), get_drafter("draft_model")(drafts, num_draft_tokens=3)]
    (handle,) = Engine(target(), get_drafter("forest")(sources)).generate([[1, 2]], params(5, 20))
    assert is_plain(handle) and len(faults) == 1 and drafts.cache.pages.num_used == 0


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_trees_that_stop_growing_before_others_keep_their_grammar(name: str) -> None:
    """The short request has space for fewer and fewer tokens; the long one continues."""
    engine = Engine(target(), get_drafter(name)(target(), AutomatonHead(close()), depth=4, width=3))
    own = {"stop_token_ids": (7,), "banned_token_ids": (7,), "grammar": counting(VOCAB)}
    handles = [engine.submit([1, 2, 3], params(1, 60, **own)), engine.submit([4, 5, 6], params(2, 6, **own))]
    while not engine.idle:
        engine.step()
    long = handles[0]
    assert all(map(is_plain, handles)) and [handle.stats.faults for handle in handles] == [0, 0]
    assert long.stats.steps < 50 and long.stats.num_draft_tokens > 50


def test_a_grammar_does_not_outlive_a_request_that_never_began(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target(max_rows=1))

    class Broken(set[int]):
        def add(self, row: int) -> None:
            raise KeyboardInterrupt

    table = engine.state._table
    with monkeypatch.context() as patch:
        patch.setattr(table, "rows_to_update", Broken())
        asked = replace(params(1, 9), stop_token_ids=(7,), grammar=counting(VOCAB))
        handle = engine.submit([1, 2], asked)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.cancel(handle)
    (after,) = engine.generate([[1, 2]], params(1, 12))
    assert is_plain(after)
