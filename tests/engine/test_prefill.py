"""Prefill in slices: running texts go on between them, and whatever happens there leaves no trace."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from engine.test_prefix_sharing import DRAFTERS, PROMPT, SIZE, alone, params, target
from oracles.named_pages import check_named_pages, record_names

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.engine.request import Handle

CHUNK = 4
LONG = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5] * 3  # 29 tokens before the root: 8 slices
SLICES = 8


def nothing_is_held(engine: Engine) -> bool:
    return engine.idle and engine.state.num_free == engine.state.max_rows and engine._cache.pages.num_used == 0


def check_end(engine: Engine, *texts: tuple[Handle, list[int], SamplingParams]) -> None:
    """Steps to the end: every request has the text of its prompt alone, and nothing is held."""
    while not engine.idle:
        engine.step()
    for handle, prompt, own in texts:
        assert handle.tokens == alone(prompt, own)
    assert nothing_is_held(engine)


def prefill_sizes(own: Any) -> list[int]:
    """The tokens of every prefill pass from now on."""
    sizes, extend = [], own.extend

    def watched(rows: Any, tokens: Any, offsets: Any, **more: Any) -> Any:
        sizes.append(tokens.shape[0])
        return extend(rows, tokens, offsets, **more)

    own.extend = watched
    return sizes


def between_slices(engine: Engine, count: int = 2) -> tuple[Handle, Handle]:
    """A running request, and a long one after some of its slices."""
    running = engine.submit([2, 6], params(1, 40))
    engine.step()
    long = engine.submit(LONG, params(2, 9))
    for _ in range(count):
        engine.step()
    assert engine.prefilling == [long]
    return running, long


@pytest.mark.parametrize("mode", ["sync", "graph"])
def test_running_texts_get_tokens_between_the_slices_of_a_long_prompt(mode: str) -> None:
    own = target()
    engine, sizes = Engine(own, prefill_chunk=CHUNK, step_mode=mode), prefill_sizes(own)
    running = engine.submit([2, 6], params(1, 40))
    engine.step()
    engine.step()
    sizes.clear()
    long = engine.submit(LONG, params(2, 9))
    for at in range(1, SLICES):
        before = len(running.tokens)
        assert engine.step() == [running, long]
        assert len(running.tokens) == before + 1 and not long.tokens
        assert engine.num_running == 2 and engine.prefilling == [long] and len(sizes) == at
        assert engine.step_mode == mode
    engine.step()
    assert not engine.prefilling and sizes == [CHUNK] * (SLICES - 1) + [1]
    engine.step()
    assert len(long.tokens) == (2 if mode == "sync" else 1), "it decodes in the step of its last slice"
    check_end(engine, (running, [2, 6], params(1, 40)), (long, LONG, params(2, 9)))


def test_a_step_prefills_a_chunk_of_all_rows_together() -> None:
    """The first request is complete before the second begins. Both decode as soon as they are complete."""
    own = target()
    engine, sizes = Engine(own, prefill_chunk=CHUNK), prefill_sizes(own)
    handles = [engine.submit(prompt, params(at, 9)) for at, prompt in enumerate([LONG[:7], LONG[5:13], [1]])]
    tokens = []
    for _ in range(4):
        engine.step()
        tokens.append([len(handle.tokens) for handle in handles])
    assert sizes == [4, 4, 4, 1]
    assert tokens == [[0, 0, 1], [1, 0, 2], [2, 0, 3], [3, 1, 4]]


def test_requests_that_wait_for_a_page_join_in_the_step_that_stores_it() -> None:
    """As long as the step has tokens left."""
    own = target()
    engine, sizes = Engine(own, prefill_chunk=16), prefill_sizes(own)
    handles = [engine.submit(PROMPT, params(seed, 9)) for seed in range(3)]
    engine.step()
    assert sizes == [10, 4] and [len(handle.tokens) for handle in handles] == [1, 1, 1]
    assert [handle.stats.cached_tokens for handle in handles] == [0, 8, 8]


@pytest.mark.parametrize("way", ["cancel", "close the stream", "drop the stream"])
@pytest.mark.parametrize("mode", ["sync", "graph"])
@pytest.mark.parametrize("kind", ["none", "draft_model", "eagle"])
def test_a_request_that_leaves_between_slices_frees_everything_at_once(
    kind: str, mode: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, own = record_names(monkeypatch), target()
    engine = Engine(own, DRAFTERS[kind](), prefill_chunk=CHUNK, step_mode=mode)
    running, long = between_slices(engine)
    stream = engine.stream(long) if way != "cancel" else None
    free, row = own.cache.pages.num_free, long.row
    if way == "cancel":
        engine.cancel(long)
    elif stream is not None and way == "close the stream":
        stream.close()
    del stream
    assert long.finish_reason == "cancelled" and long.row is None and not engine.prefilling
    assert own.cache.pages.num_free >= free + -(-len(LONG) // SIZE) and engine.state.num_free == 3
    assert own.cache.pages.num_named == 0 and row is not None and not own.cache.lengths[row]
    assert long.stats.seconds["prefill"] > 0 and engine.stats.seconds == long.stats.seconds
    sizes = prefill_sizes(own)
    engine.step()
    assert not sizes, "no slice follows"
    again = engine.submit(LONG, params(3, 5))
    while not engine.idle:
        engine.step()
        check_named_pages(own.cache, texts, own.transitions.tolist())
    assert again.stats.cached_tokens == 0
    assert [running.tokens, again.tokens] == [alone([2, 6], params(1, 40)), alone(LONG, params(3, 5))]
    assert nothing_is_held(engine)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", ["sync", "graph"])
def test_a_slice_that_fails_costs_the_running_text_nothing(mode: str, error: type[BaseException]) -> None:
    own = target()
    engine = Engine(own, prefill_chunk=CHUNK, step_mode=mode)
    running, long = between_slices(engine)
    row, before = running.row, len(running.tokens)
    assert row is not None

    def fails() -> None:
        own.before_pass = None
        raise error

    own.before_pass = fails
    with pytest.raises(error):
        engine.step()
    assert long.row is None and engine.num_queued == 1 and not engine.prefilling
    assert running.row == row and own.cache.pages.num_used == len(own.cache._owned[row])
    engine.step()
    assert running.row == row and len(running.tokens) == before + 1
    check_end(engine, (running, [2, 6], params(1, 40)), (long, LONG, params(2, 9)))


def test_a_request_that_shares_a_page_waits_for_the_whole_prefill() -> None:
    engine = Engine(target(), prefill_chunk=CHUNK)
    first, second = (engine.submit(LONG, params(seed, 9)) for seed in (1, 2))
    other = engine.submit([7, 7, 7], params(3, 9))
    for _ in range(SLICES - 1):
        engine.step()
        assert engine.prefilling == [first] and engine.num_queued == 2
    for _ in range(2):
        engine.step()
    assert (first.stats.cached_tokens, second.stats.cached_tokens) == (0, 28) and not engine.num_queued
    while not engine.idle:
        engine.step()
    assert [first.tokens, second.tokens] == [alone(LONG, params(seed, 9)) for seed in (1, 2)]
    assert other.tokens == alone([7, 7, 7], params(3, 9))


def test_a_request_that_waited_for_one_that_left_computes_the_page_itself() -> None:
    engine = Engine(target(), prefill_chunk=CHUNK)
    first, second = (engine.submit(LONG, params(seed, 9)) for seed in (1, 2))
    engine.step()
    engine.cancel(first)
    while not engine.idle:
        engine.step()
    assert second.stats.cached_tokens == 0 and second.tokens == alone(LONG, params(2, 9))


@pytest.mark.parametrize("kind", ["none", "eagle"])
def test_pages_of_a_prefill_that_saw_a_reset_get_no_names(kind: str) -> None:
    """The model may have changed between two slices. Hidden states of pages that the row shares stay with it."""
    own = target()
    engine = Engine(own, DRAFTERS[kind](), prefill_chunk=CHUNK)
    (first,) = engine.generate([PROMPT], params(1, 3))
    long = engine.submit([*PROMPT[:8], *LONG], params(2, 9))
    engine.step()
    assert long.stats.cached_tokens == 8 and engine.prefilling == [long]
    engine.reset_prefix_cache()
    while engine.prefilling:
        engine.step()
    assert own.cache.pages.num_named == 0
    while not engine.idle:
        engine.step()
    assert long.tokens == alone(list(long.prompt), params(2, 9)) and not long.stats.faults and first.finished
    assert nothing_is_held(engine)


def test_the_youngest_leaves_in_its_prefill_if_pages_run_out() -> None:
    own = target(num_pages=11)
    engine = Engine(own, prefill_chunk=1)
    running = engine.submit([2, 6], params(1, 30))
    engine.step()
    long = engine.submit(LONG, params(2, 4))
    while not long.stats.preemptions:
        engine.step()
        assert engine.prefilling == [long] or long.row is None
    assert long.row is None and not long.tokens and not engine.prefilling and own.cache.pages.num_named == 0
    check_end(engine, (running, [2, 6], params(1, 30)), (long, LONG, params(2, 4)))


def test_a_step_of_others_returns_a_prefill_to_the_queue() -> None:
    engine = Engine(target(), prefill_chunk=CHUNK)
    running, long = between_slices(engine)
    assert engine.step(only=[running]) == [running] and long.row is None and not engine.prefilling
    assert engine.step(only=[long]) == [long] and engine.prefilling == [long]
    while not engine.idle:
        engine.step()
    assert [running.tokens, long.tokens] == [alone([2, 6], params(1, 40)), alone(LONG, params(2, 9))]


def test_a_request_of_no_tokens_ends_with_its_last_slice() -> None:
    engine = Engine(target(), prefill_chunk=CHUNK)
    handle = engine.submit(LONG, SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    whole = Engine(target()).generate([LONG], handle.params)[0].prompt_logprobs
    for _ in range(SLICES - 1):
        assert engine.step() == [handle] and not handle.finished and handle.prompt_logprobs is None
    assert engine.step() == [handle] and handle.finish_reason == "length"
    assert handle.prompt_logprobs == whole and nothing_is_held(engine)


def test_a_request_counts_the_seconds_of_all_its_slices() -> None:
    engine = Engine(target(), prefill_chunk=CHUNK)
    running, long = between_slices(engine, 1)
    for _ in range(SLICES - 1):
        before, own, of_running = engine.seconds["prefill"], dict(long.stats.seconds), running.stats.seconds["prefill"]
        engine.step()
        passed = engine.seconds["prefill"] - before
        assert passed > 0 and long.stats.seconds["prefill"] - own["prefill"] == pytest.approx(passed)
        assert running.stats.seconds["prefill"] - of_running == pytest.approx(passed)
        if engine.prefilling:
            assert {phase for phase, seconds in long.stats.seconds.items() if seconds} == {"prefill"}
    assert long.tokens and long.stats.seconds["score"] > 0


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "draft_model"])
def test_drafts_do_not_depend_on_slices(kind: str) -> None:
    """A head that misses hidden states of a prompt accepts less."""
    prompts, made = [LONG, LONG[3:20], [*LONG[:17], 7], [5]], []
    for chunk in (512, 3):
        handles = Engine(target(), DRAFTERS[kind](), prefill_chunk=chunk).generate(prompts, params(4, 20))
        made.append([(handle.tokens, handle.origins, handle.stats.steps) for handle in handles])
        assert sum(handle.stats.num_accepted for handle in handles) > 20
    assert made[0] == made[1]


KINDS = {**DRAFTERS, "budget": lambda: get_drafter("ngram")(n_min=1)}


@pytest.mark.parametrize("mode", ["sync", "graph"])
@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mtp", "forest")])
def test_texts_do_not_depend_on_slices(kind: str, chunk: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few pages, among requests that come and leave at any time, interrupts, and steps of a part of the requests."""
    texts, source = record_names(monkeypatch), random.Random(chunk)
    own = target(num_pages=40)
    engine = Engine(
        own, KINDS[kind](), prefill_chunk=chunk, step_mode=mode, budget="goodput" if kind == "budget" else "fixed"
    )

    def interrupts() -> None:
        if source.random() < 0.02:
            raise KeyboardInterrupt

    own.before_pass = interrupts
    handles: list[Handle] = []
    for at in range(10):
        prompt = [*LONG[: source.choice([0, 8, 19])], *source.choices(range(8), k=source.randrange(1, 14))]
        asked = params(at, source.choice([0, 4, 12, 30]), source.choice([0.0, 0.8]))
        handles.append(engine.submit(prompt, replace(asked, prompt_logprobs=1 if at % 4 == 3 else None)))
    gone, slices = handles[1::4], 0
    while not engine.idle:
        only = set(source.sample(handles, 4)) if source.random() < 0.1 else None
        with suppress(KeyboardInterrupt):
            engine.step(only)
        check_named_pages(own.cache, texts, own.transitions.tolist())
        slices += len(engine.prefilling)
        for handle in gone:
            if source.random() < 0.05:
                engine.cancel(handle)
    assert slices > 20 and nothing_is_held(engine)
    own.before_pass = None
    for handle in handles:
        (whole,) = Engine(target(), prefix_sharing=False).generate([list(handle.prompt)], handle.params)
        assert handle.tokens == whole.tokens[: len(handle.tokens)] and not handle.stats.faults
        if handle.finish_reason != "cancelled":
            assert handle.tokens == whole.tokens and handle.prompt_logprobs == whole.prompt_logprobs


def test_warm_runs_all_rows_together_whatever_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target(), prefill_chunk=1)
    counts: list[int] = []
    step = Engine._sync_step

    def counted(self: Engine, ready: dict[int, Handle], clock: Any) -> None:
        counts.append(len(ready))
        step(self, ready, clock)

    monkeypatch.setattr(Engine, "_sync_step", counted)
    engine.warm([(4, 0)])
    assert {*counts} == {4}


@pytest.mark.parametrize("place", ["before it has the row", "while it leaves the queue"])
def test_an_interrupt_while_a_request_joins_loses_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target(), prefill_chunk=CHUNK)
    handle, faults = engine.submit(LONG, params(2, 9)), [KeyboardInterrupt()]

    class Queue(deque[Handle]):
        def remove(self, each: Handle) -> None:
            if faults:
                raise faults.pop()
            super().remove(each)

    if place == "while it leaves the queue":
        engine._queue = Queue(engine._queue)
    else:
        own = engine._prefill.add

        def add(*arguments: Any) -> None:
            own(*arguments)
            if faults:
                raise faults.pop()

        monkeypatch.setattr(engine._prefill, "add", add)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert handle.row is None and list(engine._queue) == [handle] and engine.state.num_free == engine.state.max_rows
    check_end(engine, (handle, LONG, params(2, 9)))


def test_a_step_scores_as_many_tokens_as_it_may_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes with scores are short, since they have logits; a step runs several of them."""
    monkeypatch.setattr("specdec_fast.engine.prompt_scoring._MAX_LOGITS", 3 * target().vocab_size)
    own = target()
    engine, sizes = Engine(own, prefill_chunk=16), prefill_sizes(own)
    handle = engine.submit(LONG, SamplingParams(max_new_tokens=1, temperature=0, prompt_logprobs=0))
    engine.step()
    assert sum(sizes) == 16 and max(sizes) == 3 and engine.prefilling == [handle]
    engine.step()
    assert handle.prompt_logprobs is not None and sum(sizes) == len(LONG) - 1
