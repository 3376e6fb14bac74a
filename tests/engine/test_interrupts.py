"""A step that Ctrl-C or an exception interrupts loses no row, no page and no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracles.automaton import AutomatonTarget, random_logits, scripted
from oracles.noisy_oracle import NoisyChain
from oracles.toy_tokenizer import byte_tokenizer

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.cache import PagedCache
from specdec_fast.drafters.ngram import NgramDrafter
from specdec_fast.engine import engine as engine_module
from specdec_fast.engine import output_processor
from specdec_fast.engine.request import Handle
from specdec_fast.engine.state import DecodeState
from specdec_fast.sampling.sampling_tensors import SamplingTable

PROMPTS = [[1], [2, 3], [1, 2, 3]]
PARAMS = SamplingParams(seed=3, max_new_tokens=14)


TOKENIZER = byte_tokenizer()
WRITTEN = "go: 3 € and a text of more than a window: END no"
SCRIPT = [TOKENIZER.convert_tokens_to_ids(TOKENIZER.byte_names[byte]) for byte in WRITTEN.encode()]


def target() -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, 8, seed=2), page_size=4, max_rows=3)


def drafter(want: list[list[int]]) -> NoisyChain:
    return NoisyChain([[*prompt, *text] for prompt, text in zip(PROMPTS, want, strict=True)], 0.8, 8)


def run_on(engine: Engine, error: type[BaseException]) -> int:
    """Steps until the engine is idle, and returns how often steps raised."""
    raised = 0
    for _ in range(100):
        if engine.idle:
            break
        try:
            engine.step()
        except error:
            raised += 1
            assert [*engine._queue] == sorted(engine._queue, key=lambda handle: handle.request_id)
            assert engine.state.num_free == engine.state.max_rows - engine.num_running
            for row, handle in engine._running.items():
                assert engine.state.tokens(row) == [*handle.prompt, *handle.tokens]
    return raised


def texts() -> list[list[int]]:
    return [handle.tokens for handle in Engine(target()).generate(PROMPTS, PARAMS)]


def breaking(method: Any, at: int, error: BaseException, late: bool = False) -> Any:
    """Returns the method, whose call number `at` raises before or (late) after its work."""
    calls = 0

    def wrapped(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not late:
            raise error
        found = method(*arguments, **more)
        if calls == at:
            raise error
        return found

    return wrapped


def nothing_is_held(engine: Engine) -> None:
    assert engine.idle and engine.state.num_free == engine.state.max_rows
    assert engine.target.cache.pages.num_used == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["join", "reserve"])
def test_an_admission_that_raises_leaves_the_queue_as_it_was(
    where: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = texts()
    engine = Engine(target(), get_drafter("ngram")(n_min=1))
    owner, name = (SamplingTable, "set") if where == "join" else (PagedCache, "reserve")
    monkeypatch.setattr(owner, name, breaking(getattr(owner, name), 2, MemoryError(), late))
    handles = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    with pytest.raises(MemoryError):
        engine.step()
    assert list(engine._queue) == handles and engine.state.num_free == 3 and engine.target.cache.pages.num_used == 0
    while not engine.idle:
        engine.step()
    assert [handle.tokens for handle in handles] == want
    nothing_is_held(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TypeError()])
def test_generate_leaves_an_empty_queue_when_a_prompt_interrupts_it(error: BaseException) -> None:
    engine = Engine(target())
    engine.encode = breaking(engine.encode, 3, error)  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        engine.generate(PROMPTS, PARAMS)
    nothing_is_held(engine)


PLACES: dict[str, Any] = {
    "commit": PagedCache,
    "collect_row_outputs": engine_module,
    "emit_tokens": engine_module,
    "token_logprobs": output_processor,
    "append_step": Handle,
    "append": DecodeState,
}
CONTAINED = ("token_logprobs", "append_step")  # an exception ends its request there


@pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize(
    ("where", "error"),
    [(where, error) for error in (KeyboardInterrupt, MemoryError) for where in PLACES if where not in CONTAINED]
    + [(where, KeyboardInterrupt) for where in CONTAINED],
)
def test_an_interrupted_step_is_recomputed(
    where: str, error: type[BaseException], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, origins and log-probabilities equal those of an undisturbed run."""
    wanted = [replace(PARAMS, logprobs=0, max_new_tokens=count) for count in (1, 14, 14)]
    plain = Engine(target()).generate(PROMPTS, wanted)
    engine = Engine(target(), drafter([handle.tokens for handle in plain]))
    monkeypatch.setattr(PLACES[where], where, breaking(getattr(PLACES[where], where), 2, error(), late))
    handles = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, wanted, strict=True)]
    assert run_on(engine, error) == 1
    for handle, alone in zip(handles, plain, strict=True):
        assert handle.tokens == alone.tokens and len(handle.origins) == len(handle.tokens)
        assert [each.token for each in handle.logprobs] == handle.tokens
        assert [each.logprob for each in handle.logprobs] == pytest.approx([each.logprob for each in alone.logprobs])
    nothing_is_held(engine)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])
def test_an_interrupt_while_requests_return_to_the_queue(late: bool, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their step was interrupted too, so their keys and values are ahead of the texts: none may go on with them."""
    want = texts()
    engine = Engine(target())
    monkeypatch.setattr(PagedCache, "commit", breaking(PagedCache.commit, 2, KeyboardInterrupt(), True))
    monkeypatch.setattr(Engine, "_retire", breaking(Engine._retire, at, KeyboardInterrupt(), late))
    handles = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    assert run_on(engine, KeyboardInterrupt) == 1
    assert [handle.tokens for handle in handles] == want
    nothing_is_held(engine)


@pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])
def test_a_request_whose_return_is_interrupted_does_not_run_twice(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    want = texts()
    engine = Engine(target())
    handles = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    engine.step()
    monkeypatch.setattr(Engine, "_retire", breaking(Engine._retire, 1, KeyboardInterrupt(), late))
    with pytest.raises(KeyboardInterrupt):
        engine.step([handles[1]])
    assert not set(engine._queue) & set(engine._running.values())
    assert run_on(engine, KeyboardInterrupt) == 0
    assert [handle.tokens for handle in handles] == want
    nothing_is_held(engine)


@pytest.mark.parametrize("where", ["emit_tokens", "append", "append_step"])
def test_an_interrupted_graph_step_is_recomputed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = texts()
    close = AutomatonTarget(random_logits(23, 8, seed=2) + 0.4 * random_logits(23, 8, seed=4), max_rows=3)
    engine = Engine(target(), get_drafter("draft_model")(close, num_draft_tokens=3), step_mode="graph")
    method = breaking(getattr(PLACES[where], where), 3, KeyboardInterrupt())
    monkeypatch.setattr(PLACES[where], where, method)
    handles = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    assert run_on(engine, KeyboardInterrupt) == 1 and engine.step_mode == "graph"
    assert [handle.tokens for handle in handles] == want
    nothing_is_held(engine)
    assert close.cache.pages.num_used == 0


class Interrupted:
    """The toy tokenizer; its decoding is interrupted once, when a count reaches 0."""

    left = -1

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return str(TOKENIZER.decode(tokens, **options))


@pytest.mark.parametrize(
    "ends",
    [
        {"stop": "END"},
        {"stop": "z", "stop_token_ids": (SCRIPT[-6],)},
        {"stop_token_ids": (SCRIPT[-6],)},
        {"stop": "z", "max_new_tokens": 30},
        {},
    ],
)
def test_an_interrupt_inside_the_tokenizer_loses_no_text(ends: dict[str, Any]) -> None:
    """At any of its calls: while text is built, and at its end."""
    params = SamplingParams(**({"temperature": 0, "max_new_tokens": len(SCRIPT) - 4} | ends))
    found, interrupted = [], 0
    for at in (*range(8), *range(22, 110, 7)):
        tokenizer = Interrupted()
        engine = Engine(scripted(SCRIPT, len(TOKENIZER), page_size=4), tokenizer=tokenizer)
        handle = engine.submit(SCRIPT[:4], params)
        tokenizer.left = at
        interrupted += run_on(engine, KeyboardInterrupt)
        nothing_is_held(engine)
        found.append((handle.tokens, handle.text, handle.finish_reason))
    assert all(each == found[0] for each in found) and interrupted >= 1


class Refusing:
    """The toy tokenizer, which decodes until it must refuse."""

    error: BaseException | None = None

    def decode(self, tokens: list[int], **options: Any) -> str:
        if self.error is not None:
            raise self.error
        return str(TOKENIZER.decode(tokens, **options))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no such token")])
@pytest.mark.parametrize("queued", [False, True])
def test_a_cancel_interrupted_while_decoding_text_cancels(queued: bool, error: BaseException) -> None:
    tokenizer = Refusing()
    engine = Engine(scripted(SCRIPT, len(TOKENIZER), page_size=4), tokenizer=tokenizer)
    handle = engine.submit(SCRIPT[:4], SamplingParams(temperature=0, max_new_tokens=30))
    engine.step()
    if queued:
        engine._requeue(handle)
    tokenizer.error = error
    try:
        engine.cancel(handle)
        assert handle.error is error
    except KeyboardInterrupt as raised:
        assert raised is error
    nothing_is_held(engine)
    tokenizer.error = None
    engine.cancel(handle)
    assert engine.step() == [] and handle.finish_reason == "cancelled" and handle.text == WRITTEN[4 : 4 + 1]


def test_a_cancel_interrupted_before_its_work_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target())
    handles = [engine.submit(prompt, PARAMS) for prompt in [*PROMPTS, [1]]]  # three are running, one is queued
    engine.step()
    for handle in handles:
        with monkeypatch.context() as patch:
            patch.setattr(Handle, "finish", breaking(Handle.finish, 1, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                engine.cancel(handle)
        assert handle.finish_reason == "cancelled"
        engine.cancel(handle)
    nothing_is_held(engine)


def test_an_interrupted_generate_cancels_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds if Ctrl-C comes again meanwhile."""
    engine = Engine(target())
    ends = Handle.finish
    monkeypatch.setattr(Engine, "_sync_step", breaking(Engine._sync_step, 3, KeyboardInterrupt()))
    monkeypatch.setattr(Handle, "finish", breaking(ends, 1, KeyboardInterrupt("again")))
    with pytest.raises(KeyboardInterrupt, match="again"):
        engine.generate([*PROMPTS, [1]], PARAMS)
    nothing_is_held(engine)


@pytest.mark.parametrize(
    ("owner", "name", "late"),
    [
        (NgramDrafter, "release", False),
        (NgramDrafter, "release", True),
        (PagedCache, "release", True),
        (DecodeState, "leave", True),
    ],
)
@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_while_requests_leave_frees_everything(
    owner: type, name: str, late: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts end in one step, and a third continues."""
    wanted = [replace(PARAMS, max_new_tokens=count) for count in (4, 4, 9)]
    plain = [handle.tokens for handle in Engine(target()).generate(PROMPTS, wanted)]
    engine = Engine(target(), get_drafter("ngram")(n_min=1))
    handles = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, wanted, strict=True)]
    engine.step()
    monkeypatch.setattr(owner, name, breaking(getattr(owner, name), at, KeyboardInterrupt(), late))
    assert run_on(engine, KeyboardInterrupt) == 1
    assert [handle.tokens for handle in handles] == plain
    nothing_is_held(engine)
