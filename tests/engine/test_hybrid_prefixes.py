"""Prefix sharing of models with recurrent layers: rows start with pages and the states that were saved at their end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles import hybrid_models, models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.cache import hybrid
from specdec_fast.cache.hybrid import HybridCache
from specdec_fast.cache.recurrent_states import RecurrentStates

FAMILIES = ("qwen3_next", "bamba", "mamba", "lfm2")
GREEDY = SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True)


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """States are saved in short prompts too."""
    monkeypatch.setattr(hybrid, "SHORTEST_PREFIX", 8)
    monkeypatch.setattr(hybrid, "SNAPSHOT_DISTANCE", 16)
    yield


def target(family: str, rows: int = 3) -> HuggingFaceTarget:
    return HuggingFaceTarget(hybrid_models.model(family), max_rows=rows, page_size=4, max_length=128)


def conversation(engine: Engine, params: SamplingParams = GREEDY) -> tuple[list[list[int]], list[int]]:
    """Texts of three turns, each behind the last one's, and how many tokens of each prompt were stored."""
    text, texts, cached = [*range(5, 24)], [], []
    for turn in range(3):
        handle = engine.generate([text], params)[0]
        texts.append(list(handle.tokens))
        cached.append(handle.stats.cached_tokens)
        text = [*text, *handle.tokens, 60 + turn, 61]
    return texts, cached


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_of_a_conversation_do_not_change(family: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=10, ignore_eos=True)
    own = target(family)
    want, none = conversation(Engine(own, prefix_sharing=False), params)
    texts, cached = conversation(Engine(own), params)
    assert texts == want and none == [0, 0, 0]
    assert cached == [0, 16, 28], "the last full page of the prompt before"
    own.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_adopted_rows_have_the_bits_of_rows_that_read_their_whole_prompt(family: str) -> None:
    own = target(family)
    engine = Engine(own)
    cache: Any = own.cache
    system = [*range(30, 66)]  # two saved states: at 16 and 32 tokens, and at its end
    engine.generate([[*system, 5, 6]], GREEDY)
    states: list[list[torch.Tensor]] = []
    for shares in (True, False):
        if not shares:
            engine.reset_prefix_cache()
        handle = engine.submit([*system[:20], 7, 8, 9], GREEDY)
        engine.step()
        assert handle.stats.cached_tokens == (16 if shares else 0)
        parts = (cache.recurrent.windows, cache.recurrent.states)
        states.append([each[handle.row].clone() for part in parts for each in part.values()])
        engine.cancel(handle)
    assert hybrid_models.equal(*states)
    own.close()


def test_prompts_that_begin_alike_are_read_once() -> None:
    own = target("bamba")
    handles = Engine(own).generate([[*range(5, 25), 30 + at, 40] for at in range(3)], GREEDY)
    assert [handle.stats.cached_tokens for handle in handles] == [0, 20, 20]
    own.close()


def questions(count: int, length: int) -> list[list[int]]:
    """Prompts of a length that have their first 15 tokens in common."""
    return [[*range(30, 45), *(1 + (7 * at + 3 * place) % 90 for place in range(length - 15))] for at in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_third_prompt_starts_behind_what_two_have_in_common(family: str) -> None:
    """The second prompt saves its states where the first one goes on in another way."""
    own = target(family)
    engine, prompts = Engine(own), questions(3, 23)
    want = [list(Engine(own, prefix_sharing=False).generate([each], GREEDY)[0].tokens) for each in prompts]
    handles = [engine.generate([each], GREEDY)[0] for each in prompts]
    assert [handle.stats.cached_tokens for handle in handles] == [0, 0, 12]
    assert [list(handle.tokens) for handle in handles] == want
    own.close()


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("length", [23, 75])
def test_what_prompts_share_outlives_the_states_of_one_prompt(rows: int, length: int) -> None:
    """Long prompts have more places for states than are saved."""
    own = target("mamba", rows)
    engine = Engine(own)
    found = [engine.generate([each], GREEDY)[0].stats.cached_tokens for each in questions(5, length)]
    assert found == [0, 0, 12, 12, 12]
    engine.reset_prefix_cache()
    engine.generate([[*questions(1, 15)[0], 7]], GREEDY)
    found = [engine.generate([each], GREEDY)[0].stats.cached_tokens for each in questions(4, length)]
    assert found == [12, 12, 12, 12], "the beginning was sent alone"
    own.close()


def test_an_unrelated_prompt_drops_what_only_one_prompt_needs() -> None:
    own = target("mamba", rows=2)
    engine, (first, second, third) = Engine(own), questions(3, 23)
    for prompt in (first, second, [*range(70, 80)]):
        engine.generate([prompt], GREEDY)
    assert engine.generate([third], GREEDY)[0].stats.cached_tokens == 12
    own.close()


@pytest.mark.parametrize(("rows", "length"), [(3, 23), (6, 75)])
def test_prompts_that_come_together_keep_what_they_share(rows: int, length: int) -> None:
    """They have more places for states than are saved while they are read side by side."""
    own = target("mamba", rows)
    handles = Engine(own).generate(questions(4, length), GREEDY)
    assert [handle.stats.cached_tokens for handle in handles] == [0, 0, 12, 12]
    own.close()


@pytest.mark.parametrize("family", ["bamba", "lfm2"])
def test_prompts_that_come_together_share_their_beginning(family: str) -> None:
    own = target(family, rows=6)
    prompts = questions(6, 23)
    want = [list(each.tokens) for each in Engine(own, prefix_sharing=False).generate(prompts, GREEDY)]
    handles = Engine(own).generate([list(each) for each in prompts], GREEDY)
    assert [handle.stats.cached_tokens for handle in handles] == [0, 0, 12, 12, 12, 12]
    assert [list(handle.tokens) for handle in handles] == want
    own.close()


@pytest.mark.parametrize("place", ["adopt", "write"])
def test_a_failed_adoption_costs_no_row(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = target("mamba", rows=2)
    engine, prompt = Engine(own), questions(1, 23)[0]
    engine.generate([list(prompt)], GREEDY)
    want = list(engine.generate([[*prompt, 5]], GREEDY)[0].tokens)
    owner: Any = HybridCache if place == "adopt" else RecurrentStates
    real, left = getattr(owner, place), [3]

    def failing(*given: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise MemoryError(place)
        return real(*given)

    monkeypatch.setattr(owner, place, failing)
    handle = engine.submit([*prompt, 5], GREEDY)
    for _ in range(3):
        with pytest.raises(MemoryError):
            engine.step()
    while not engine.idle:
        engine.step()
    assert list(handle.tokens) == want and engine.state.num_free == 2
    own.close()


def test_the_oldest_states_are_dropped_first_and_all_when_names_are(monkeypatch: pytest.MonkeyPatch) -> None:
    own = target("mamba", rows=2)
    engine, pages = Engine(own), own.cache.pages
    prompts = [[first, *range(10, 25)] for first in (1, 2, 3)]
    for prompt in prompts:
        engine.generate([[*prompt, 4]], GREEDY)
    assert len(pages._snapshots) == 2, "as many as rows"
    found = [engine.generate([[*prompt, 9]], GREEDY)[0].stats.cached_tokens for prompt in reversed(prompts)]
    assert found == [16, 16, 0]
    engine.reset_prefix_cache()
    assert not pages._snapshots
    own.close()


def test_drafters_that_read_states_of_prompts_get_them() -> None:
    own = target("qwen3_next")
    want, _ = conversation(Engine(own, prefix_sharing=False))
    drafter = get_drafter("medusa")(own, models.HEADS["medusa"](own))
    texts, cached = conversation(Engine(own, drafter))
    assert texts == want and cached[1:] == [16, 28]
    own.close()


def test_a_hybrid_draft_takes_no_pages_without_states() -> None:
    """Prompts of its target are shared, and its own states are read again."""
    own = HuggingFaceTarget(hybrid_models.model("bamba"), max_rows=2, page_size=4, max_length=128)
    twin = HuggingFaceTarget(hybrid_models.tiny_model("bamba"), max_rows=2, page_size=4, max_length=128)
    engine = Engine(own, get_drafter("draft_model")(twin, num_draft_tokens=4, pick="greedy"))
    cached = conversation(engine)[1]
    assert cached[2] == 28 and engine.stats.tau > 4
    own.close()


def test_a_state_that_is_not_written_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a row adopts pages without the states behind them."""
    own = target("mamba")
    want, _ = conversation(Engine(own, prefix_sharing=False))
    monkeypatch.setattr(HybridCache, "adopt", super(HybridCache, HybridCache).adopt)
    texts, _ = conversation(Engine(own))
    assert texts != want
    own.close()


def test_short_prompts_save_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    own = target("lfm2")
    _, cached = conversation(Engine(own))
    assert cached == [0, 0, 0] and not own.cache.pages._snapshots
    own.close()


def test_without_memory_nothing_is_saved_and_texts_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own = target("bamba")
    want, _ = conversation(Engine(own, prefix_sharing=False))

    def failing(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(RecurrentStates, "read", failing)
    assert conversation(Engine(own)) == (want, [0, 0, 0])
    own.close()


def test_a_prompt_keeps_few_states_and_names_no_page_behind_them() -> None:
    own = target("mamba", rows=1)
    engine, cache, most = Engine(own), own.cache, 0
    handle = engine.submit([*range(1, 91)], SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True))
    while not engine.idle:
        engine.step()
        most = max(most, *(len(each) for each in cache._snapshots.values()), 0)
    assert most <= 2 and len(cache.pages._snapshots) == 2
    assert len(handle.tokens) == 30 and cache.pages.num_named == 22, "88 of 89 tokens, and none that were generated"
    own.close()


@pytest.mark.parametrize("chunk", [3, 5, 16])
def test_prompts_in_small_chunks_save_and_adopt_the_same_states(chunk: int) -> None:
    own = target("qwen3_next")
    want, _ = conversation(Engine(own, prefix_sharing=False))
    texts, cached = conversation(Engine(own, prefill_chunk=chunk))
    assert texts == want and cached == [0, 16, 28]
    own.close()


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
def test_preempted_requests_share_and_keep_their_texts(family: str) -> None:
    """Pages for two of three requests: one is preempted, and reads its text again behind what is shared."""
    own = HuggingFaceTarget(hybrid_models.model(family), max_rows=3, page_size=4, max_length=128, num_pages=29)
    prompts = [[*range(5, 25), 30 + at] for at in range(3)]
    params = SamplingParams(temperature=0.8, seed=2, max_new_tokens=40, ignore_eos=True)
    texts: list[list[list[int]]] = []
    for shares in (False, True):
        engine = Engine(own, get_drafter("ngram")(num_draft_tokens=3), prefix_sharing=shares)
        texts.append([list(each.tokens) for each in engine.generate([list(each) for each in prompts], params)])
        assert engine.stats.preemptions > 0
    assert texts[0] == texts[1]
    own.close()


def test_scored_prompts_have_the_log_probabilities_of_prompts_that_are_not_shared() -> None:
    own = target("mamba")
    params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True, prompt_logprobs=0)
    prompt, scores = [*range(5, 30)], []
    for shares in (False, True):
        engine = Engine(own, prefix_sharing=shares)
        engine.generate([[*prompt, 4]], GREEDY)
        handle = engine.generate([[*prompt, 9]], params)[0]
        scores.append((handle.prompt_logprobs, list(handle.tokens)))
    assert scores[0] == scores[1]
    own.close()
