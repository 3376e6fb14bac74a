"""Prefix sharing: texts do not change, and what an earlier request has stored is not computed again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.automaton_head import AutomatonHead
from oracles.named_pages import check_named_pages, record_names

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.engine.request import Handle

STATES, VOCAB, SIZE = 23, 8, 4
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0]  # two full pages and three tokens


def table(noise: float = 0.0) -> torch.Tensor:
    return random_logits(STATES, VOCAB, seed=2) + noise * random_logits(STATES, VOCAB, seed=4)


class CountingTarget(AutomatonTarget):
    """Counts the tokens that are prefilled."""

    prefilled = 0

    def extend(self, rows: Any, tokens: Any, offsets: Any, **more: Any) -> Any:
        self.prefilled += tokens.shape[0]
        return super().extend(rows, tokens, offsets, **more)


def target(**shape: Any) -> CountingTarget:
    return CountingTarget(table(), **{"max_rows": 4, "max_length": 160, "page_size": SIZE} | shape)


def params(seed: int = 0, count: int = 9, temperature: float = 0.8) -> SamplingParams:
    return SamplingParams(seed=seed, max_new_tokens=count, temperature=temperature)


def alone(prompt: list[int], own: SamplingParams) -> list[int]:
    """Returns a text on a fresh target."""
    (handle,) = Engine(target(), prefix_sharing=False).generate([prompt], own)
    return handle.tokens


def draft_model(**options: Any) -> Any:
    drafts = CountingTarget(table(0.4), max_rows=4, max_length=160, page_size=SIZE)
    return get_drafter("draft_model")(drafts, **{"num_draft_tokens": 3} | options)


def head(name: str) -> Any:
    drafts = AutomatonTarget(table(0.4), max_rows=4, max_length=160)
    return get_drafter(name)(target(), AutomatonHead(drafts), depth=3, width=2)


DRAFTERS: dict[str, Any] = {
    "none": lambda: None,
    "ngram": lambda: get_drafter("ngram")(n_min=1),
    "suffix": lambda: get_drafter("suffix")(),
    "recycling": lambda: get_drafter("recycling")(top_k=4),
    "draft_model": draft_model,
    "draft_tree": lambda: get_drafter("draft_tree")(AutomatonTarget(table(0.4), max_rows=4, max_length=160)),
    "eagle": lambda: head("eagle"),
    "eagle3": lambda: head("eagle3"),
    "mtp": lambda: head("mtp"),
    "forest": lambda: get_drafter("forest")([get_drafter("ngram")(n_min=1), draft_model()]),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_texts_of_a_conversation_do_not_change(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conversations take turns, each turn beside a second sample; every page has the contents of its name."""
    texts, engine = record_names(monkeypatch), Engine(target(), DRAFTERS[kind]())
    histories = [list(PROMPT), [*PROMPT[:6], 7, 7, 7]]
    for turn in range(4):
        asked = [params(10 * turn + at, 13, temperature) for at in range(4)]
        prompts = [histories[at // 2] for at in range(4)]
        handles = engine.generate(prompts, asked)
        for prompt, own, handle in zip(prompts, asked, handles):
            assert handle.tokens == alone(prompt, own) and handle.error is None
        assert check_named_pages(engine.target.cache, texts, engine.target.transitions.tolist()) > 2
        assert engine.target.cache.pages.num_used == 0
        if turn:
            assert all(handle.stats.cached_tokens >= len(PROMPT) // SIZE * SIZE for handle in handles)
        histories = [[*prompt, *handle.tokens, turn] for prompt, handle in zip(prompts[::2], handles[::2])]
    assert engine.stats.faults == 0
    model = getattr(engine.drafter, "model", None)
    assert model is None or model.cache.pages.num_used == 0


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("draft_model", "rejection"), ("eagle", "recursive_rejection"), ("recycling", "recursive_rejection")],
)
def test_rules_with_fresh_uniforms_write_the_same_texts(kind: str, rule: str) -> None:
    """Drafts depend on the text alone, so a second, equal request on a used cache equals the first on a fresh one."""
    made = []
    for sharing in (True, False):
        drafter = draft_model(pick="sampled") if kind == "draft_model" else DRAFTERS[kind]()
        engine = Engine(target(), drafter, rule=rule, prefix_sharing=sharing)
        own = params(3, 20)
        handles = [engine.generate([[*PROMPT, at]], own)[0] for at in (1, 2, 1)]
        assert handles[0].tokens == handles[2].tokens and handles[0].stats.steps == handles[2].stats.steps
        assert handles[2].stats.cached_tokens == (8 if sharing else 0)
        made.append([(handle.tokens, handle.origins) for handle in handles])
    assert made[0] == made[1]


def test_samples_of_one_prompt_prefill_it_once() -> None:
    engine = Engine(target())
    handles = engine.generate([PROMPT] * 4, [params(seed) for seed in range(4)])
    assert [handle.stats.cached_tokens for handle in handles] == [0, 8, 8, 8]
    assert engine.target.prefilled == 10 + 3 * 2  # all tokens but the root, then those of the partial page
    assert [handle.tokens for handle in handles] == [alone(PROMPT, params(seed)) for seed in range(4)]
    assert engine.stats.cached_tokens == 24 and engine.stats.as_dict()["cached_tokens"] == 24
    assert engine.target.cache.pages.num_hits == 6 and engine.target.cache.pages.num_evictions == 0


def test_requests_that_begin_alike_prefill_the_beginning_once() -> None:
    """Two different beginnings in turn, in passes of at most five tokens."""
    engine = Engine(target(), prefill_chunk=5)
    prompts = [[*PROMPT[:8], 1, 2, 3], [7, *PROMPT[:8], 1], [*PROMPT[:8], 4], [7, *PROMPT[:8], 5]]
    handles = engine.generate(prompts, params())
    assert [handle.stats.cached_tokens for handle in handles] == [0, 0, 8, 8]
    assert [handle.tokens for handle in handles] == [alone(prompt, params()) for prompt in prompts]


def test_an_answer_is_not_computed_again_in_the_next_turn() -> None:
    engine = Engine(target())
    (first,) = engine.generate([PROMPT], params(1, 30))
    history = [*PROMPT, *first.tokens]
    before = engine.target.prefilled
    (second,) = engine.generate([[*history, 6, 6]], params(2))
    stored = (len(history) - 1) // SIZE * SIZE
    assert second.stats.cached_tokens == stored and engine.target.prefilled - before == len(history) + 1 - stored
    assert second.tokens == alone([*history, 6, 6], params(2))


@pytest.mark.parametrize("length", range(1, 14))
def test_the_root_and_partial_pages_are_never_shared(length: int) -> None:
    engine, prompt = Engine(target()), (PROMPT * 2)[:length]
    for seed in (1, 2):
        (handle,) = engine.generate([prompt], params(seed, 3))
        assert handle.tokens == alone(prompt, params(seed, 3))
    assert handle.stats.cached_tokens == (length - 1) // SIZE * SIZE


def test_texts_with_different_salts_share_nothing() -> None:
    engine, found = Engine(target()), {}
    for salt in ("a", "b", None, "a", "b", None):
        handle = engine.submit(PROMPT, params(), cache_salt=salt)
        while not engine.idle:
            engine.step()
        found.setdefault(salt, []).append(handle.stats.cached_tokens)
        assert handle.tokens == alone(PROMPT, params())
    assert found == {"a": [0, 8], "b": [0, 8], None: [0, 8]}
    with pytest.raises(ValueError, match="cache_salt: got 3; expected a string"):
        engine.submit(PROMPT, cache_salt=3)  # type: ignore[arg-type]
    assert engine.idle


def test_sharing_can_be_switched_off() -> None:
    engine = Engine(target(), prefix_sharing=False)
    handles = engine.generate([PROMPT] * 3, params())
    assert engine.target.prefilled == 30 and engine.stats.cached_tokens == 0
    assert engine.target.cache.pages.num_named == 0 and all(handle.page_names is None for handle in handles)
    assert engine.explain().endswith("\nprefix sharing off: it was switched off")
    engine.reset_prefix_cache()


def test_explain_says_what_is_shared() -> None:
    assert Engine(target()).explain().endswith("\nprefix sharing on: prompts and generated texts")
    told = Engine(target(), head("eagle")).explain()
    assert told.endswith("\nprefix sharing on: prompts alone, since the drafter reads their hidden states")
    odd = target()
    odd.cache = _Unable(odd.cache)  # type: ignore[assignment]
    assert "prefix sharing off: the cache (_Unable) cannot share pages" in Engine(odd).explain()


class _Unable:
    """A cache without the methods of sharing."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        if name in ("adopt", "page_names"):
            raise AttributeError(name)
        return getattr(self._cache, name)


def test_a_cache_of_ones_own_needs_no_sharing() -> None:
    odd = target()
    odd.cache = _Unable(odd.cache)  # type: ignore[assignment]
    handles = Engine(odd).generate([PROMPT] * 2, params())
    assert [handle.tokens for handle in handles] == [alone(PROMPT, params())] * 2


# -- too few pages


@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model", "eagle"])
@pytest.mark.parametrize(("size", "pages"), [(1, 50), (2, 26), (4, 14), (8, 8)])
def test_a_tight_pool_evicts_and_preempts_without_a_trace(
    kind: str, size: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, texts = random.Random(5), record_names(monkeypatch)
    own = target(page_size=size, num_pages=pages)
    engine = Engine(own, DRAFTERS[kind]())
    books = [[source.randrange(VOCAB) for _ in range(12)] for _ in range(3)]
    prompts = [[*source.choice(books)[: source.randrange(5, 13)], source.randrange(2)] for _ in range(40)]
    asked = [params(at, source.randrange(1, 25), source.choice([0.0, 1.0])) for at in range(40)]
    handles = [engine.submit(*each) for each in zip(prompts, asked)]
    while not engine.idle:
        engine.step()
        check_named_pages(own.cache, texts, own.transitions.tolist())
    assert [handle.tokens for handle in handles] == [alone(*each) for each in zip(prompts, asked)]
    assert engine.stats.preemptions > 3 and own.cache.pages.num_evictions > 5 and own.cache.pages.num_hits > 10
    assert own.cache.pages.num_used == 0 and engine.stats.faults == 0


def test_a_preempted_request_takes_its_own_pages_back() -> None:
    own = target(max_rows=2, num_pages=16)
    engine = Engine(own)
    old, young = engine.submit(PROMPT, params(1, 40)), engine.submit([7, *PROMPT], params(2, 40))
    while not young.stats.preemptions:
        engine.step()
    engine.cancel(old)
    before, length = own.prefilled, len(young.prompt) + len(young.tokens)
    while not engine.idle:
        engine.step()
    assert own.prefilled - before < length - 1 - 2 * SIZE, "most pages had been kept"
    assert young.tokens == alone([7, *PROMPT], params(2, 40)) and young.stats.cached_tokens == 0


# -- changes


def test_another_engine_begins_without_prefixes() -> None:
    shared = target()
    Engine(shared).generate([PROMPT], params())
    assert shared.cache.pages.num_named > 0
    (handle,) = Engine(shared).generate([PROMPT], params())
    assert handle.stats.cached_tokens == 0


def weights(model: Any) -> list[torch.Tensor]:
    return [each for each in model.parameters() if each.dim() == 2]


CHANGES: dict[str, Any] = {
    "in place": lambda model: [each.mul_(1.5) for each in weights(model)[3:4]],
    "through data": lambda model: [each.data.mul_(1.5) for each in weights(model)],
    "new data": lambda model: [setattr(each, "data", each.data * 1.5) for each in weights(model)[3:4]],
    "loaded": lambda model: model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()}),
}


@pytest.mark.parametrize("how", CHANGES)
def test_no_stored_prefix_outlives_a_change_of_weights(how: str) -> None:
    prompt, own = models.prompt(40), params(3, 8, 0.0)
    engine = Engine(models.target("llama"))
    engine.generate([prompt], own)
    with torch.no_grad():
        CHANGES[how](engine.target.model)
    (changed,) = engine.generate([prompt], own)
    (again,) = engine.generate([prompt], own)
    want = Engine(engine.target, prefix_sharing=False).generate([prompt], own)[0].tokens
    assert changed.tokens == again.tokens == want != models.greedy_text("llama", 40, 8)
    assert (changed.stats.cached_tokens, again.stats.cached_tokens) == (0, 32)


def test_prefixes_can_be_forgotten_while_requests_run() -> None:
    """Keys of running requests may be older than the change, so they get no names either."""
    own = target()
    engine = Engine(own)
    running = engine.submit(PROMPT, params(1, 20))
    engine.step()
    own.transitions, own._host = (own.transitions + 1) % STATES, None  # type: ignore[attr-defined]
    engine.reset_prefix_cache()
    while not engine.idle:
        engine.step()
    assert running.finished and own.cache.pages.num_named == 0
    (handle,) = engine.generate([PROMPT], params(2))
    assert handle.stats.cached_tokens == 0
    (handle,) = engine.generate([PROMPT], params(3))
    assert handle.stats.cached_tokens == 8


def test_a_warm_up_names_no_pages_and_keeps_those_it_found() -> None:
    engine = Engine(target(), draft_model())
    engine.generate([PROMPT], params())
    names = dict(engine.target.cache.pages._page_of)
    engine.warm()
    assert engine.target.cache.pages._page_of == names
    (handle,) = engine.generate([PROMPT], params())
    assert handle.stats.cached_tokens == 8


# -- other ways to run


@pytest.mark.parametrize("kind", ["none", "draft_model", "eagle"])
def test_steps_as_cuda_graphs_share_prefixes_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, engine = record_names(monkeypatch), Engine(target(), DRAFTERS[kind](), step_mode="graph")
    history = list(PROMPT)
    for turn in range(3):
        handles = engine.generate([history] * 3, [params(10 * turn + at, 14) for at in range(3)])
        for at, handle in enumerate(handles):
            assert handle.tokens == alone(history, params(10 * turn + at, 14))
        check_named_pages(engine.target.cache, texts, engine.target.transitions.tolist())
        history = [*history, *handles[0].tokens, turn]
    assert engine.step_mode == "graph" and engine.stats.cached_tokens > 100 and engine.stats.faults == 0
    assert engine.target.cache.pages.num_used == 0


def test_a_tight_pool_under_cuda_graph_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, own = record_names(monkeypatch), target(num_pages=20)
    engine = Engine(own, step_mode="graph")
    prompts = [[*PROMPT[: 4 + at % 8], at % 3] for at in range(20)]
    handles = engine.generate(prompts, [params(at, 25) for at in range(20)])
    assert [handle.tokens for handle in handles] == [alone(prompt, params(at, 25)) for at, prompt in enumerate(prompts)]
    assert engine.stats.preemptions and own.cache.pages.num_evictions and own.cache.pages.num_hits
    check_named_pages(own.cache, texts, own.transitions.tolist())


def test_a_text_that_ended_in_an_error_gives_no_names_to_what_it_generated() -> None:
    engine = Engine(target())
    handle = engine.submit(PROMPT, params(1, 30))
    for _ in range(14):
        engine.step()
    handle.finish("error", ValueError("broken"))
    engine._retire(handle)
    assert engine.target.cache.pages.num_named == 2, "the prompt's pages alone"


def test_handles_keep_no_names_after_their_end() -> None:
    engine = Engine(target())
    (handle,) = engine.generate([PROMPT], params())
    assert isinstance(handle, Handle) and handle.page_names is None
