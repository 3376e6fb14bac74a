"""Failures at every place of prefix sharing: no page leaks, no named page is wrong, and texts do not change."""

from __future__ import annotations

from typing import Any

import pytest
from engine.test_interrupts import breaking
from engine.test_prefix_sharing import PROMPT, SIZE, alone, draft_model, head, params, target
from oracles.named_pages import check_named_pages, record_names

from specdec_fast import Engine
from specdec_fast.cache import PageAllocator, PagedCache, PageNames, paged
from specdec_fast.engine import engine as engine_module
from specdec_fast.engine.drafter_runner import DrafterRunner
from specdec_fast.engine.prefill import Prefill
from specdec_fast.engine.prefix_sharing import PrefixSharing
from specdec_fast.engine.state import DecodeState

TURNS = [[*PROMPT, 2, 6], [*PROMPT[:9], 4, 4, 4], list(PROMPT), [*PROMPT, 2, 6, 7, 7, 7]]

PLACES: dict[str, tuple[Any, str]] = {
    "the digests": (PageNames, "upto"),
    "find": (PageAllocator, "find"),
    "share": (PageAllocator, "share"),
    "name": (PageAllocator, "name"),
    "free": (PageAllocator, "free"),
    "allocate": (PageAllocator, "allocate"),
    "adopt": (PagedCache, "adopt"),
    "name_pages": (PagedCache, "name_pages"),
    "reserve": (PagedCache, "reserve"),
    "release": (PagedCache, "release"),
    "stage": (PagedCache, "stage"),
    "commit": (PagedCache, "commit"),
    "table": (paged, "upload_values"),
    "join": (DecodeState, "join"),
    "append": (DecodeState, "append"),
    "leave the state": (DecodeState, "leave"),
    "prefill": (Prefill, "run"),
    "emit": (engine_module, "emit_tokens"),
    "begin": (DrafterRunner, "begin"),
    "release the drafter": (DrafterRunner, "release"),
    "join the sharing": (PrefixSharing, "join"),
    "finish the prefill": (PrefixSharing, "finish_prefill"),
    "leave the sharing": (PrefixSharing, "leave"),
}


def run(engine: Engine, handles: list[Any], check: Any) -> int:
    """Steps until all requests have ended; returns how many steps raised."""
    raised = 0
    for _ in range(400):
        if engine.idle and all(handle.finished for handle in handles):
            return raised
        try:
            engine.step()
        except (MemoryError, KeyboardInterrupt):
            raised += 1
        check()
    raise AssertionError("requests are left")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_leaves_no_wrong_page(place: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure hits call 1, 2, 3, ... of a place, on an empty cache or with pages of the first turn."""
    owner, name = PLACES[place]
    texts, hits = record_names(monkeypatch), 0
    original = getattr(owner, name)
    for at in (1, 2, 3, 4, 6, 9, 14):
        own = target(max_rows=3, num_pages=40)
        engine = Engine(own, draft_model() if at % 2 else None)

        caches = [own.cache, *([engine.drafter.model.cache] if engine.drafter is not None else [])]

        def check(caches: Any = caches) -> None:
            for cache in caches:  # the draft model has the same states
                check_named_pages(cache, texts, own.transitions.tolist(), counts=False)  # noqa: B023

        handles: list[Any] = []
        error = KeyboardInterrupt() if at % 2 else MemoryError()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, breaking(original, at, error, late))
            for turn in range(2):
                handles += [_submit(engine, prompt, 10 * turn + seed) for seed, prompt in enumerate(TURNS)]
                hits += run(engine, handles, check)
        assert [handle.tokens for handle in handles] == [
            alone(list(handle.prompt), handle.params) for handle in handles
        ], (place, at)
        after = _submit(engine, PROMPT, 5)  # an interrupted release is made up for
        run(engine, [after], check)
        assert own.cache.pages.num_used == 0 and own.cache.pages.num_hits > 0
        assert after.tokens == alone(PROMPT, after.params)
        assert engine.state.num_free == 3, "a row is lost"
    assert hits, "no step was hit: the test would prove nothing"


def _submit(engine: Engine, prompt: list[int], seed: int) -> Any:
    for _ in range(2):
        try:
            return engine.submit(prompt, params(seed, 7))
        except (MemoryError, KeyboardInterrupt):
            continue
    raise AssertionError("submit raised twice")


@pytest.mark.parametrize("kind", ["plain", "draft_model", "eagle"])
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("step_mode", ["sync", "graph"])
def test_passes_that_fail_store_nothing_under_a_name(
    step_mode: str, at: int, kind: str, monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    """Prefill in passes of five tokens: the first passes are prefills, later ones decode. They store wrong keys."""
    texts, own = record_names(monkeypatch), target(max_rows=3)
    drafter = {"plain": lambda: None, "draft_model": draft_model, "eagle": lambda: head("eagle")}[kind]()
    engine = Engine(own, drafter, prefill_chunk=5, step_mode=step_mode)
    handles = [engine.submit(prompt, params(seed, 9)) for seed, prompt in enumerate(TURNS)]
    calls = 0
    stage = PagedCache.stage

    def broken(self: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        found = stage(self, *arguments, **more)
        if self is own.cache:
            calls += 1
            if calls == at:
                self.keys[0].flatten(0, 1)[found.slots[found.slots >= 0]] = 77.0
                raise MemoryError
        return found

    monkeypatch.setattr(PagedCache, "stage", broken)

    def check() -> None:
        check_named_pages(own.cache, texts, own.transitions.tolist())

    run(engine, handles, check)
    assert calls >= at
    assert [handle.tokens for handle in handles] == [
        alone(prompt, params(seed, 9)) for seed, prompt in enumerate(TURNS)
    ]
    again = [engine.submit(prompt, params(seed, 9)) for seed, prompt in enumerate(TURNS)]
    run(engine, again, check)
    assert [handle.tokens for handle in again] == [handle.tokens for handle in handles]
    assert own.cache.pages.num_used == 0 and engine.stats.cached_tokens > 0


def test_rows_of_a_failed_prefill_give_no_names() -> None:
    own = target()
    engine = Engine(own, prefill_chunk=4)
    calls = 0

    def third() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    own.before_pass = third
    handle = engine.submit(PROMPT, params(1, 5))
    for _ in range(2):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert own.cache.pages.num_named == 0 and handle.row is None and engine.num_queued == 1
    engine.cancel(handle)
    assert own.cache.pages.num_named == own.cache.pages.num_used == 0


def test_requests_that_wait_for_a_page_survive_a_failure_of_the_first() -> None:
    """Three equal prompts: the first one's prefill fails, so all three begin again."""
    own = target()
    engine, calls = Engine(own), 0

    def first() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError

    own.before_pass = first
    handles = [engine.submit(PROMPT, params(seed, 9)) for seed in range(3)]
    with pytest.raises(MemoryError):
        engine.step()
    assert list(engine._queue) == handles
    assert run(engine, handles, lambda: None) == 0
    assert [handle.stats.cached_tokens for handle in handles] == [0, 8, 8]
    assert [handle.tokens for handle in handles] == [alone(PROMPT, params(seed, 9)) for seed in range(3)]


@pytest.mark.parametrize("step_mode", ["sync", "graph"])
@pytest.mark.parametrize("after", range(1, 12))
def test_cancelled_requests_name_what_they_have_stored(
    after: int, step_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, own = record_names(monkeypatch), target()
    engine = Engine(own, step_mode=step_mode)
    gone, stays = engine.submit(PROMPT, params(1, 40)), engine.submit(PROMPT, params(2, 20))
    for _ in range(after):
        engine.step()
    engine.cancel(gone)
    check_named_pages(own.cache, texts, own.transitions.tolist())
    history = [*PROMPT, *gone.tokens, 1]
    later = engine.submit(history, params(3, 9))
    run(engine, [stays, later], lambda: check_named_pages(own.cache, texts, own.transitions.tolist()))
    assert later.stats.cached_tokens == max((len(history) - 2) // SIZE, 2) * SIZE
    assert stays.tokens == alone(PROMPT, params(2, 20)) and later.tokens == alone(history, params(3, 9))
    assert own.cache.pages.num_used == 0
