"""Draft models share pages of equal prefixes: a draft stores a prompt once, and failures leave no wrong page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.test_prefix_sharing import PROMPT, CountingTarget, alone, params, table, target
from oracles import models
from oracles.named_pages import check_named_pages, record_names

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.cache import PagedCache, paged
from specdec_fast.draft_runners.draft_chain_runner import DraftChainRunner
from specdec_fast.draft_runners.shared_prefixes import SharedPrefixes

KINDS = ("draft_model", "draft_tree")


def draft(**shape: Any) -> CountingTarget:
    return CountingTarget(table(0.4), **{"max_rows": 4, "max_length": 160, "page_size": 4} | shape)


def drafter(kind: str, model: Any) -> Any:
    return get_drafter(kind)(model, **({"num_draft_tokens": 3} if kind == "draft_model" else {"widths": (2, 1)}))


def fed(model: CountingTarget) -> int:
    """Tokens of the draft's passes since the last call."""
    count, model.prefilled = model.prefilled, 0
    return count


@pytest.mark.parametrize("step_mode", ["sync", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_stored_once(kind: str, step_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For four samples at the same time, and for a second turn."""
    texts, model = record_names(monkeypatch), draft()
    engine = Engine(target(), drafter(kind, model), step_mode=step_mode if kind == "draft_model" else "sync")
    prompt = PROMPT * 3
    handles = [engine.submit(prompt, params(seed, 20)) for seed in range(4)]
    engine.step()
    drafted = 4 * 4 * (engine.step_mode == "graph" or kind == "draft_model")
    assert fed(model) <= 33 + 3 * 2 + 4 + drafted, "the first prompt, partial pages and roots of the others, drafts"
    while not engine.idle:
        engine.step()
    hits, history = model.cache.pages.num_hits, [*prompt, *handles[0].tokens, 1, 2]
    assert hits == 3 * 8
    fed(model)
    again = engine.submit(history, params(9, 12))
    engine.step()
    assert model.cache.pages.num_hits - hits >= 8 and fed(model) < len(history) - 20
    while not engine.idle:
        engine.step()
    for seed, handle in enumerate(handles):
        assert handle.tokens == alone(prompt, params(seed, 20))
    assert again.tokens == alone(history, params(9, 12)) and again.stats.num_accepted > 0
    assert check_named_pages(model.cache, texts, model.transitions.tolist()) > 10
    assert model.cache.pages.num_used == 0 and engine.stats.faults == 0


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_an_empty_cache(kind: str) -> None:
    """The same draft tokens are accepted at the same places."""
    found = []
    for fresh in (True, False):
        model = draft()
        engine = Engine(target(), drafter(kind, model), prefix_sharing=not fresh)
        handles = []
        for turn in range(3):
            handles += engine.generate([[*PROMPT, turn]] * 2, [params(turn), params(turn + 5)])
        assert (model.cache.pages.num_hits > 4) != fresh
        found.append([(handle.tokens, handle.origins, handle.stats.num_draft_tokens) for handle in handles])
    assert found[0] == found[1]


@pytest.mark.parametrize("place", ["adopt", "first pass", "second pass", "table", "name_pages"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_leaves_no_wrong_page(
    kind: str, place: str, monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    """Wrong keys of a pass that fails stay in pages without names, and rows write to no page that they share."""
    texts, model = record_names(monkeypatch), draft()
    engine = Engine(target(), drafter(kind, model))
    engine.generate([PROMPT], params(9))
    handles = [engine.submit([*PROMPT, 7, 7, 7, at % 2], params(at, 15)) for at in range(4)]
    upload, calls = paged.upload_values, {"passes": 0, "others": 0}

    def fail_once(original: Any) -> Any:
        def broken(*arguments: Any, **more: Any) -> Any:
            found = original(*arguments, **more)
            if original is upload or arguments[0] is model.cache:
                calls["others"] += 1
                if calls["others"] == 2:
                    raise MemoryError
            return found

        return broken

    def fail_in_pass(original: Any) -> Any:
        def broken(self: Any, *arguments: Any, **more: Any) -> Any:
            slots = original(self, *arguments, **more)
            if self is model.cache:
                calls["passes"] += 1
                if calls["passes"] == (1 if place == "first pass" else 2):
                    self.keys[0].flatten(0, 1)[slots.slots[slots.slots >= 0]] = 77.0
                    raise MemoryError
            return slots

        return broken

    with monkeypatch.context() as patch:
        if place in ("first pass", "second pass"):
            patch.setattr(PagedCache, "stage", fail_in_pass(PagedCache.stage))
        elif place == "table":
            patch.setattr(paged, "upload_values", fail_once(upload))
        else:
            patch.setattr(PagedCache, place, fail_once(getattr(PagedCache, place)))
        while not engine.idle:
            try:
                engine.step()
            except MemoryError:
                assert place == "table"  # it may hit the target's table as well
            check_named_pages(model.cache, texts, model.transitions.tolist())
    assert max(calls.values()) >= 2 and (faults or place == "table")
    again = engine.generate([[*PROMPT, 7, 7, 7, 1]] * 3, params(3, 15))
    for handle in (*handles, *again):
        assert handle.tokens == alone(list(handle.prompt), handle.params)
    assert check_named_pages(model.cache, texts, model.transitions.tolist()) > 2
    assert model.cache.pages.num_used == 0 and any(handle.stats.num_accepted for handle in again)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_write_to_pages_of_an_interrupted_release(
    kind: str, monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    """The draft's pages stay with the row that the next text gets."""
    texts, model = record_names(monkeypatch), draft(max_rows=1)
    engine = Engine(target(max_rows=1), drafter(kind, model))
    release, fail = PagedCache.release, [True]

    def broken(self: PagedCache, rows: Any) -> None:
        if self is model.cache and rows and any(self._owned) and fail:
            fail.pop()
            raise MemoryError
        release(self, rows)

    monkeypatch.setattr(PagedCache, "release", broken)
    for turn in range(3):
        prompt = [turn, *PROMPT, turn]
        (handle,) = engine.generate([prompt], params(turn, 12))
        assert handle.tokens == alone(prompt, params(turn, 12))
        check_named_pages(model.cache, texts, model.transitions.tolist())
    assert not fail and len(faults) == 1 and model.cache.pages.num_used == 0


class _View:
    def __init__(self, salt: str | None) -> None:
        self.salt = salt

    def cache_salt(self, row: int) -> str | None:
        return self.salt


def test_a_row_without_its_pages_is_refused() -> None:
    model = draft(num_pages=5)
    prefixes = SharedPrefixes(model, list)
    prefixes.begin(_View(""), [0])
    assert model.cache.reserve(1, 16)
    with pytest.raises(RuntimeError, match="draft model: the pages of row 0 were lost after a failure"):
        prefixes.store([0], [PROMPT], lambda row, count: None)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_different_salts_share_nothing(kind: str) -> None:
    model = draft()
    engine = Engine(target(), drafter(kind, model))
    for salt, hits in (("a", 0), ("b", 0), ("a", 2)):
        before, handle = model.cache.pages.num_hits, engine.submit(PROMPT, params(1), cache_salt=salt)
        while not engine.idle:
            engine.step()
        assert model.cache.pages.num_hits - before == hits and handle.tokens == alone(PROMPT, params(1))


def test_changed_weights_of_a_draft_are_noticed() -> None:
    own = SamplingParams(temperature=0, max_new_tokens=10)
    small = HuggingFaceTarget(models.kin("llama"), max_length=320)
    engine = Engine(models.target("llama"), get_drafter("draft_model")(small, num_draft_tokens=4))
    for _ in range(2):
        (handle,) = engine.generate([models.prompt(75)], own)
    assert small.cache.pages.num_hits == 4
    with torch.no_grad():
        for weight in small.model.parameters():
            weight.add_(0.01)
    (handle,) = engine.generate([models.prompt(75)], own)
    assert small.cache.pages.num_hits == 4 and handle.tokens == models.greedy_text("llama", 75, 10)


@pytest.mark.parametrize(("translation", "salt"), [(object(), ""), (None, None)])
def test_rows_that_share_nothing_have_no_names(translation: Any, salt: str | None) -> None:
    """Texts in another tokenizer, whose ends may change as they grow, and rows of engines without sharing."""
    runner = DraftChainRunner(draft(), 8, "same" if translation is None else "slem", translation)
    runner.begin(_View(salt), [0])  # type: ignore[arg-type]
    runner._prefixes.store([0], [PROMPT], lambda row, count: pytest.fail("stored"))
    runner._prefixes.name_pages(0, PROMPT)
    assert runner.model.cache.pages.num_named == 0
