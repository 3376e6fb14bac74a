"""The distribution of texts under rules `recursive_rejection`, `traversal` and `block`, through the whole engine, with
trees (block: chains) of every proposal kind.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.distributions import dist, joint
from oracles.processed_decoding import processed_dist
from oracles.sampled_tree import SampledTree

from specdec_fast import Engine, SamplingParams
from specdec_fast.core.draft import ProposalKind

STATES, VOCAB, PROMPT = 7, 4, [1]
C, D, E, W = ProposalKind
SHAPES = {
    "hybrid": [(0, W), (0, C), (1, W), (1, C), (3, D)],
    "without_replacement": [(0, D), (0, E), (1, D), (1, E), (2, D)],
    "mixed": [(0, C), (0, D), (0, E), (2, D), (1, C)],
    "chain": [(0, D), (1, D), (2, D)],
}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.9}
PROCESSORS = PENALTIES | {"logit_bias": {2: 0.8}, "banned_token_ids": (0,), "forced_tokens": {1: 3}}


def bias_of_the_last_two(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[(token_ids[-1] + 2 * token_ids[-2] if len(token_ids) > 1 else 0) % VOCAB] += 1.5
    return logits


TEXTS: dict[str, Any] = {
    "no_repeat_ngram_size": 3,
    "bad_words": ((0, 2), (3, 3, 1)),
    "logits_processors": (bias_of_the_last_two,),
    "temperature": 1.2,
}
CASES = [
    ("recursive_rejection", "hybrid", {}),
    ("recursive_rejection", "without_replacement", {"temperature": 1.4, "top_k": 3}),
    ("recursive_rejection", "mixed", PROCESSORS),
    ("traversal", "hybrid", {"temperature": 1.4, "top_p": 0.9}),
    ("traversal", "without_replacement", {}),
    ("traversal", "mixed", {"temperature": 0.7, **PROCESSORS}),
    ("block", "chain", PROCESSORS),
]


def target() -> AutomatonTarget:
    return AutomatonTarget(random_logits(STATES, VOCAB, seed=VOCAB), max_rows=500, max_length=16, page_size=4)


def drafter(shape: str) -> SampledTree:
    reader = target()
    table = 0.3 * random_logits(STATES, VOCAB, seed=VOCAB) + 0.7 * random_logits(STATES, VOCAB, seed=77)
    return SampledTree(lambda text: table[reader.state_after(text)], SHAPES[shape])


@pytest.mark.parametrize(("rule", "shape", "params"), CASES, ids=lambda value: str(value))
def test_the_joint_distribution_of_three_tokens_is_the_target_s(rule: str, shape: str, params: dict[str, Any]) -> None:
    engine, reader = Engine(target(), drafter(shape), rule=rule), target()
    requests = 1200 if {"logit_bias", "logits_processors"} & {*params} else 2500
    handles = [engine.submit(PROMPT, SamplingParams(seed=seed, max_new_tokens=6, **params)) for seed in range(requests)]
    while not engine.idle:
        engine.step()
    settings = SamplingParams(**params)
    exact = joint(lambda text: processed_dist(reader.logits_after([*PROMPT, *text]), settings, PROMPT, text), 3, VOCAB)
    assert p_value(Counter(tuple(handle.tokens[:3]) for handle in handles), exact) > 1e-3
    assert engine.stats.steps > len(handles), "texts must be made of several steps"
    assert 0.2 < engine.stats.tau - 1 < 2.5, "all accepted or all refused: the test would prove little"


@pytest.mark.parametrize(("rule", "shape"), [("recursive_rejection", "mixed"), ("traversal", "hybrid")])
def test_the_joint_distribution_with_processors_that_read_texts(rule: str, shape: str) -> None:
    test_the_joint_distribution_of_three_tokens_is_the_target_s(rule, shape, TEXTS)


@pytest.mark.parametrize("rule", ["recursive_rejection", "traversal", "best"])
def test_a_text_does_not_depend_on_other_rows(rule: str) -> None:
    engine = Engine(target(), drafter("mixed"), rule=rule)
    together = engine.generate([PROMPT] * 5, [SamplingParams(seed=seed, max_new_tokens=8) for seed in range(5)])
    for seed, handle in enumerate(together):
        alone = Engine(target(), drafter("mixed"), rule=rule)
        assert alone.generate([PROMPT], SamplingParams(seed=seed, max_new_tokens=8))[0].tokens == handle.tokens


@pytest.mark.parametrize("rule", ["recursive_rejection", "traversal"])
def test_greedy_texts_are_the_target_s(rule: str) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=10)
    want = Engine(target()).generate([PROMPT], params)[0].tokens
    assert Engine(target(), drafter("mixed"), rule=rule).generate([PROMPT], params)[0].tokens == want


class Dropping(SampledTree):
    """Samples, and then drops drafts with low probabilities."""

    def kept(self, weights: torch.Tensor) -> torch.Tensor:
        return (weights > 0.35).all(1)


def test_dropping_a_sampled_token_is_detected() -> None:
    """A drafter must submit every token that it samples to verification. No type can enforce this."""
    reader, honest = target(), drafter("mixed")
    engine = Engine(target(), Dropping(honest.logits_after, [(0, D)]), rule="recursive_rejection")
    handles = [engine.submit(PROMPT, SamplingParams(seed=seed, max_new_tokens=3)) for seed in range(2500)]
    while not engine.idle:
        engine.step()
    exact = joint(lambda text: dist(reader.logits_after([*PROMPT, *text]), 1.0), 1, VOCAB)
    assert p_value(Counter(tuple(handle.tokens[:1]) for handle in handles), exact) < 1e-6
