"""Every drafter under all request options at once: logits processors, budgets, cancellations, pools that are too small.

Under replay each text equals plain decoding of its request alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from drafters.test_contract import VOCAB, every_drafter, target
from oracles.toy_grammar import counting

from specdec_fast import Engine, SamplingParams, get_rule
from specdec_fast.engine.request import Handle

# setting -> (probability, values): each request takes some of them
SETTINGS: dict[str, tuple[float, Callable[[random.Random], Any]]] = {
    "top_k": (0.3, lambda source: source.randrange(1, VOCAB + 1)),
    "top_p": (0.3, lambda source: source.choice([0.3, 0.7, 0.95])),
    "min_p": (0.3, lambda source: source.choice([0.02, 0.3])),
    "repetition_penalty": (0.3, lambda source: source.choice([0.7, 1.3, 2.0])),
    "presence_penalty": (0.3, lambda source: source.choice([-1.0, 0.5, 2.0])),
    "frequency_penalty": (0.3, lambda source: source.choice([-0.5, 0.3, 1.0])),
    "logit_bias": (0.2, lambda source: {source.randrange(VOCAB): source.choice([-3.0, 2.0, 5.0])}),
    "banned_token_ids": (0.2, lambda source: tuple(source.sample(range(VOCAB), 2))),
    "allowed_token_ids": (0.2, lambda source: tuple(sorted(source.sample(range(VOCAB), 5)))),
    "forced_tokens": (0.2, lambda source: {source.randrange(6): source.randrange(VOCAB)}),
    "min_new_tokens": (0.2, lambda source: source.randrange(8)),
    "grammar": (0.2, lambda source: counting(VOCAB, source.choice([2, 3, 5]))),
    "logprobs": (0.2, lambda source: source.randrange(4)),
    "stop_token_ids": (0.2, lambda source: (source.randrange(VOCAB),)),
    "ignore_eos": (0.2, lambda source: True),
}
ENDS = (3, 5)


def settings(source: random.Random) -> dict[str, Any]:
    return {name: value(source) for name, (share, value) in SETTINGS.items() if source.random() < share}


@cache
def wanted(seed: int, count: int) -> list[tuple[list[int], SamplingParams, Handle]]:
    """Returns requests without contradictions, each with its plain decoding."""
    source = random.Random(seed)
    found: list[tuple[list[int], SamplingParams, Handle]] = []
    while len(found) < count:
        prompt = [source.randrange(VOCAB) for _ in range(source.randrange(1, 12))]
        always: Mapping[str, Any] = {
            "temperature": source.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
            "seed": len(found),
            "max_new_tokens": source.randrange(8, 30),
        }
        engine = Engine(target(max_length=64), eos_token_ids=ENDS)
        try:
            params = SamplingParams(**always, **settings(source))
            alone = engine.submit(prompt, params)
        except ValueError:  # for example, a forced token is banned
            continue
        while not engine.idle:
            engine.step()
        found.append((prompt, params, alone))
    return found


@every_drafter
@pytest.mark.parametrize("seed", [0, 1])
def test_texts_are_those_of_plain_decoding_under_all_options(build: Callable[[], Any], seed: int) -> None:
    source = random.Random(seed)
    asked = wanted(seed, 8)
    budget = "goodput" if seed else "fixed"
    pool = {"num_pages": 22, "page_size": 4} if seed else {"num_pages": 70, "page_size": 1}
    engine = Engine(target(max_length=64, **pool), build(), eos_token_ids=ENDS, rule=get_rule("replay"), budget=budget)
    handles: list[Handle] = []
    while len(handles) < len(asked) or not engine.idle:
        for prompt, params, _ in asked[len(handles) :][: source.randrange(4)]:
            handles.append(engine.submit(prompt, params, num_draft_tokens=source.choice([None, None, 0, 1, 3])))
        if source.random() < 0.05 and handles:
            engine.cancel(source.choice(handles))
        engine.step()
    for handle, (_, params, alone) in zip(handles, asked, strict=True):
        assert handle.stats.faults == 0
        if handle.finish_reason == "cancelled":
            assert handle.tokens == alone.tokens[: len(handle.tokens)]
            continue
        assert (handle.tokens, handle.finish_reason) == (alone.tokens, alone.finish_reason), params
        assert len(handle.logprobs) == len(alone.logprobs)
        for ours, theirs in zip(handle.logprobs, alone.logprobs):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert engine.target.cache.pages.num_used == 0
