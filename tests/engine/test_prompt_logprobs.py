"""Log-probabilities of prompts: those of the model, whatever the chunks, shared pages, neighbours and preemptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.test_prefix_sharing import PROMPT, VOCAB, CountingTarget, draft_model, head, target
from oracles import models

import specdec_fast.engine.prompt_scoring as scoring_module
from specdec_fast import Engine, SamplingParams
from specdec_fast.sampling.logprobs import TokenLogprob


def check(found: list[TokenLogprob | None] | None, prompt: list[int], logits: torch.Tensor, count: int) -> None:
    """Compares with a pass over the whole prompt, whose logits are [n, V]."""
    assert found is not None and found[0] is None and len(found) == len(prompt)
    want = logits[:-1].float().log_softmax(1)
    for at, (each, token) in enumerate(zip(found[1:], prompt[1:], strict=True)):
        assert each is not None and each.token == token
        assert each.logprob == pytest.approx(float(want[at, token]), abs=1e-4)
        best = want[at].topk(count)
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def logits_of(model: CountingTarget, prompt: list[int]) -> torch.Tensor:
    return torch.stack([model.table[model.state_after(prompt[:at])] for at in range(1, len(prompt) + 1)])


DRAFTERS: dict[str, Any] = {"none": lambda: None, "draft_model": draft_model, "eagle": lambda: head("eagle")}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("chunk", "most"), [(512, 2**24), (3, 2**24), (512, 2 * VOCAB), (5, VOCAB)])
def test_every_prompt_token_has_the_model_s_probability(
    kind: str, chunk: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch with requests that ask for none. Few logits exist at a time, and drafters lose no hidden states."""
    monkeypatch.setattr(scoring_module, "_MAX_LOGITS", most)
    prompts = [PROMPT, PROMPT[:7], [5], [2, 6, 6, 1, 0, 3]]
    counts = [2, None, 0, 3]
    wanted = [
        SamplingParams(seed=at, temperature=0.8, max_new_tokens=6, prompt_logprobs=count, banned_token_ids=(1,))
        for at, count in enumerate(counts)
    ]
    plain = Engine(target(), DRAFTERS[kind]()).generate(prompts, [SamplingParams(seed=at, temperature=0.8,
        max_new_tokens=6, banned_token_ids=(1,)) for at in range(4)])  # fmt: skip
    model, widths = target(), []
    extend = model.extend

    def watched(*arguments: Any, **options: Any) -> Any:
        output = extend(*arguments, **options)
        widths.append(0 if output.logits is None else output.logits.numel())
        return output

    model.extend = watched  # type: ignore[method-assign]
    handles = Engine(model, DRAFTERS[kind](), prefill_chunk=chunk).generate(prompts, wanted)
    assert max(widths) <= most and sum(widths) == VOCAB * (len(PROMPT) - 1 + 5)
    assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain]
    for prompt, handle, count in zip(prompts, handles, counts, strict=True):
        if count is None:
            assert handle.prompt_logprobs is None and "prompt_logprobs" not in handle.as_dict()
        else:
            check(handle.prompt_logprobs, prompt, logits_of(model, prompt), count)
            assert handle.as_dict()["prompt_logprobs"][0] is None


def test_a_shared_prefix_is_computed_again_for_them() -> None:
    """Pages have no logits. Such a request stores pages for others as usual."""
    model = target()
    engine = Engine(model)
    own = SamplingParams(seed=1, max_new_tokens=3)
    asks = SamplingParams(seed=1, max_new_tokens=3, prompt_logprobs=1)
    (first,) = engine.generate([PROMPT], own)
    before = model.prefilled
    (second,) = engine.generate([PROMPT], asks)
    assert model.prefilled - before == len(PROMPT) - 1 and second.stats.cached_tokens == 0
    check(second.prompt_logprobs, PROMPT, logits_of(model, PROMPT), 1)
    assert second.tokens == first.tokens
    together = engine.generate([[7, *PROMPT]] * 3, [asks, own, asks])  # they do not wait for each other's pages either
    assert [handle.stats.cached_tokens > 0 for handle in together] == [False, True, False]
    for handle in together[::2]:
        check(handle.prompt_logprobs, [7, *PROMPT], logits_of(model, [7, *PROMPT]), 1)


def test_a_preempted_request_scores_its_prompt_once() -> None:
    model = target(num_pages=13)
    asks = [SamplingParams(seed=at, max_new_tokens=24, prompt_logprobs=0) for at in range(2)]
    handles = Engine(model).generate([PROMPT, PROMPT[::-1]], asks)
    assert sum(handle.stats.preemptions for handle in handles) > 0
    for prompt, handle in zip((PROMPT, PROMPT[::-1]), handles, strict=True):
        check(handle.prompt_logprobs, prompt, logits_of(model, prompt), 0)


def test_a_failed_prefill_leaves_no_half_of_them() -> None:
    model = target()
    engine = Engine(model, prefill_chunk=4)
    handle = engine.submit(PROMPT, SamplingParams(seed=1, max_new_tokens=2, prompt_logprobs=1))
    passes = iter([None, None, MemoryError()])

    def fails() -> None:
        if (error := next(passes, None)) is not None:
            raise error

    model.before_pass = fails
    for _ in range(2):
        engine.step()
    with pytest.raises(MemoryError):
        engine.step()
    assert handle.prompt_logprobs is None
    while not engine.idle:
        engine.step()
    check(handle.prompt_logprobs, PROMPT, logits_of(model, PROMPT), 1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_those_of_a_transformers_model(name: str) -> None:
    prompt = models.prompt(21)
    with torch.no_grad():
        logits = models.untouched(name)(torch.tensor([prompt])).logits[0]
    engine = Engine(models.target(name), prefill_chunk=8)
    (handle,) = engine.generate([prompt], SamplingParams(temperature=0, max_new_tokens=2, prompt_logprobs=4))
    check(handle.prompt_logprobs, prompt, logits, 4)


@pytest.mark.parametrize("count", [-1, 1001, True, 2.0])
def test_wrong_counts_are_refused(count: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt_logprobs: got .*; expected None, or a count from 0 to 1000"):
        SamplingParams(prompt_logprobs=count)


@pytest.mark.parametrize("mode", ["sync", "graph"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_requests_of_no_tokens_end_after_their_prefill(kind: str, mode: str) -> None:
    """They may fill the context. Their neighbours have the same texts as without them."""
    model, plain = target(), target()
    limit = model.cache.max_length
    full = [at * at % VOCAB for at in range(limit)]
    engine = Engine(model, DRAFTERS[kind](), step_mode=mode)
    none = SamplingParams(max_new_tokens=0, prompt_logprobs=1, temperature=0)
    some = SamplingParams(max_new_tokens=9, temperature=0)
    (alone,) = Engine(plain, DRAFTERS[kind]()).generate([PROMPT], some)
    handles = engine.generate([PROMPT, full, [5], *[PROMPT[:3]] * 9], [some, none, none, *[none] * 9])
    assert handles[0].tokens == alone.tokens
    for handle in handles[1:]:
        assert (handle.tokens, handle.finish_reason, handle.limit) == ([], "length", "max_new_tokens")
        check(handle.prompt_logprobs, list(handle.prompt), logits_of(model, list(handle.prompt)), 1)
        assert handle.stats.steps == 0 and handle.stats.faults == 0 and handle.stats.seconds["prefill"] > 0
    assert engine.idle and engine.state.num_free == model.cache.max_rows and int(model.cache.lengths.sum()) == 0
    assert list(engine.stream(engine.submit(PROMPT, none))) == []
    assert engine.step() == [] and engine.seconds["prefill"] > 0
    alone = engine.submit(PROMPT, none)
    assert engine.step() == [alone]
    with pytest.raises(ValueError, match=rf"prompt: got {limit + 1} tokens; expected at most the context limit of"):
        engine.submit([*full, 1], none)
    with pytest.raises(ValueError, match=rf"prompt: got {limit} tokens; expected fewer than the context limit of"):
        engine.submit(full, some)
    with pytest.raises(ValueError, match=r"forced_tokens: got 0; expected an index below 0"):
        SamplingParams(max_new_tokens=0, forced_tokens=[3])
