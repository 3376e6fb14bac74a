"""An engine that threads share: texts are those of one thread, and no thread blocks forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from oracles.automaton import AutomatonTarget, random_logits
from oracles.noisy_oracle import NoisyChain
from oracles.toy_tokenizer import byte_tokenizer

from specdec_fast import Draft, Engine, SamplingParams
from specdec_kernels import TreePlan

TOKENIZER = byte_tokenizer()
PROMPTS = [[1, 2], [3, 4], [5, 6], [7, 8], [2, 9], [4, 1]]
PARAMS = [SamplingParams(seed=at, max_new_tokens=40) for at in range(len(PROMPTS))]


def target() -> AutomatonTarget:
    return AutomatonTarget(random_logits(100, len(TOKENIZER), seed=2), page_size=4, max_rows=3)


def engine() -> Engine:
    wanted = [[*prompt, *text.tokens] for prompt, text in zip(PROMPTS, Engine(target()).generate(PROMPTS, PARAMS))]
    return Engine(target(), NoisyChain(wanted, 0.7, 4), tokenizer=TOKENIZER)


class Watched(AutomatonTarget):
    """Yields to other threads while it scores, and records concurrent calls."""

    inside = beside = 0

    def score(self, draft: Draft, plan: TreePlan, aux_hidden_states: Sequence[str] = ()) -> Any:
        self.inside += 1
        time.sleep(0.001)
        self.beside += self.inside - 1
        self.inside -= 1
        return super().score(draft, plan, aux_hidden_states)


def together(*work: Callable[[], object]) -> None:
    """Runs each function in its own thread, and raises an exception of any of them."""
    errors: list[BaseException] = []

    def run(each: Callable[[], object]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("trial", range(3))
def test_every_thread_streams_its_own_text(trial: int) -> None:
    plain = Engine(target(), tokenizer=TOKENIZER).generate(PROMPTS, PARAMS)
    shared = engine()
    texts: dict[int, str] = {}

    def client(at: int) -> None:
        texts[at] = "".join(shared.stream(shared.submit(PROMPTS[at], PARAMS[at])))

    together(*(lambda at=at: client(at) for at in range(len(PROMPTS))))
    assert [texts[at] for at in range(len(PROMPTS))] == [handle.text for handle in plain]
    assert shared.idle and shared.state.num_free == 3


def test_steps_and_cancellations_wait_for_a_step() -> None:
    watched = Watched(random_logits(100, len(TOKENIZER), seed=2), page_size=4, max_rows=3)
    shared, found = Engine(watched), []
    handles = [shared.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS)]

    def drive() -> None:
        while not shared.idle:
            shared.step()

    def cancel() -> None:
        for handle in handles[1::2]:
            shared.cancel(handle)
            found.append(watched.inside)

    together(drive, drive, cancel)
    assert watched.beside == 0 and found == [0, 0, 0]
    assert [len(handle.tokens) for handle in handles[::2]] == [40, 40, 40]


def test_one_steps_while_another_submits_and_cancels() -> None:
    want = {handle.params.seed: handle.tokens for handle in Engine(target()).generate(PROMPTS, PARAMS)}
    shared, handles, over = engine(), [], threading.Event()

    def ask() -> None:
        for round in range(20):
            at = round % len(PROMPTS)
            handles.append(shared.submit(PROMPTS[at], PARAMS[at]))
            if round % 3 == 1:
                shared.cancel(handles[-2])
        over.set()

    def drive() -> None:
        while not (over.is_set() and shared.idle):
            shared.step()

    together(ask, drive)
    assert {handle.finish_reason for handle in handles} <= {"length", "cancelled"}
    for handle in handles:
        own = want[handle.params.seed]
        assert handle.tokens == own[: len(handle.tokens)]
        assert handle.finish_reason == "cancelled" or len(handle.tokens) == 40


def test_text_from_another_thread_s_step_needs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = engine()
    handle = shared.submit(PROMPTS[0], PARAMS[0])
    while not handle.stable_text(0):
        shared.step()
    there = handle.stable_text(0)

    def broken() -> None:
        raise MemoryError

    monkeypatch.setattr(shared, "step", broken)
    text = shared.stream(handle)
    assert next(text) == there
    with pytest.raises(MemoryError):
        next(text)


def test_a_handle_of_another_engine_is_refused() -> None:
    """Otherwise it would be stepped forever, or ended without its engine's knowledge."""
    one, other = engine(), engine()
    handle = one.submit(PROMPTS[0], PARAMS[0])
    for use in (lambda: list(other.stream(handle)), lambda: other.cancel(handle)):
        with pytest.raises(ValueError, match="handle: got request 0 of another engine; expected one of its own"):
            use()
    assert not handle.finished and one.num_queued == 1
    assert "".join(one.stream(handle)) == handle.text != ""


def test_a_refused_request_streams_nothing() -> None:
    shared = engine()
    _, handle = shared.generate([PROMPTS[0], []], PARAMS[0])
    assert handle.finish_reason == "error" and list(shared.stream(handle)) == [] and handle.remaining == 0
