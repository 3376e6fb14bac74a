"""Custom logits processors through the engine: a failing one ends its request alone, where plain decoding would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.test_public_interface import ENDS, NEW, PROMPTS, RULES_OF_KINDS, automaton, drafter
from oracles.processed_decoding import processed_decode

from specdec_fast import Engine, SamplingParams

FAILING = {
    "raises": (lambda logits: {}[3], "KeyError: 3"),
    "nan": (lambda logits: logits * torch.nan, "returned nan"),
    "shape": (lambda logits: logits[1:], "returned logits of shape [8]; expected [9]"),
    "nothing": (lambda logits: logits - torch.inf, "forbids every token"),
}


@pytest.mark.parametrize(
    ("kind", "rule"), [(kind, rule) for kind, rules in RULES_OF_KINDS.items() for rule in rules[:1] + rules[2:]]
)
@pytest.mark.parametrize("case", FAILING)
def test_a_processor_that_fails_ends_its_request_alone(kind: str, rule: str, case: str) -> None:
    fail, words = FAILING[case]

    def fails_after_three(prompt: list[int], output: list[int], logits: torch.Tensor) -> Any:
        return logits if len(output) < 3 else fail(logits)

    common: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": NEW, "min_new_tokens": 20}
    wanted = [
        SamplingParams(seed=1, **common),
        SamplingParams(seed=2, logits_processors=[fails_after_three], **common),
        SamplingParams(seed=3, no_repeat_ngram_size=3, **common),
    ]
    target = automaton()
    want = [processed_decode(target.logits_after, PROMPTS[at], wanted[at], ENDS) for at in (0, 2)]
    start = processed_decode(target.logits_after, PROMPTS[1], SamplingParams(seed=2, **common), ENDS)[:3]
    texts = [[*PROMPTS[0], *want[0]], [*PROMPTS[2], *want[1]], [*PROMPTS[1], *start, 1, 1, 1]]
    engine = Engine(target, drafter(kind, texts), rule=rule, eos_token_ids=ENDS)
    first, failed, third = engine.generate(PROMPTS[:3], wanted)
    assert failed.finish_reason == "error" and len(failed.tokens) == 3
    message = f"request {failed.request_id}: logits processor "
    assert str(failed.error).startswith(message) and words in str(failed.error)
    assert [first.error, third.error] == [None, None]
    if engine.rule.replays:
        assert failed.tokens == start
        assert [first.tokens, third.tokens] == want
    assert target.cache.pages.num_used == 0 and engine.idle


@pytest.mark.parametrize("call", ["step", "generate", "cancel", "close", "warm"])
def test_a_processor_that_calls_its_own_engine_fails_alone(call: str) -> None:
    """A step inside of a step would move the rows that the outer one works on: other texts would change."""
    target = automaton()
    engine = Engine(target, drafter("tree", [PROMPTS[0] * 9]), eos_token_ids=ENDS)

    def calls_the_engine(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        arguments = {"generate": ([PROMPTS[2]],), "cancel": (handles[0],)}.get(call, ())
        getattr(engine, call)(*arguments)
        return logits

    common: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": NEW}
    params = SamplingParams(seed=1, **common)
    want = processed_decode(target.logits_after, PROMPTS[0], params, ENDS)
    both = params, SamplingParams(seed=2, logits_processors=[calls_the_engine], **common)
    handles = [engine.submit(prompt, each) for prompt, each in zip(PROMPTS, both)]
    while not engine.idle:
        engine.step()
    assert handles[0].tokens == want
    assert handles[1].finish_reason == "error" and "inside of one of its own steps" in str(handles[1].error)
    assert target.cache.pages.num_used == 0 and not engine.closed
    engine.close()
