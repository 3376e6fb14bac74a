"""The distribution of texts under rule `rejection`, through the whole engine: joint counts of three tokens against
exact probabilities.

Thousands of requests with seeds 0, 1, 2, ... over a table-driven target. Seeds are fixed, so a test passes or
fails for good;
the mutants in tests/mutants show that these sample sizes detect real mistakes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.distributions import dist, joint
from oracles.sampled_chain import DeterministicChain, SampledChain

from specdec_fast import Engine, SamplingParams, get_drafter

STATES = 7
PROMPT = [1]
ROWS = 500


def target(vocab: int, **changes: Any) -> AutomatonTarget:
    shape = {"max_rows": ROWS, "max_length": 16, "page_size": 4} | changes
    return AutomatonTarget(random_logits(STATES, vocab, seed=vocab), **shape)


def draft_logits(vocab: int, closeness: float) -> torch.Tensor:
    """The target's table mixed with another one; 1 is the target's own."""
    return closeness * random_logits(STATES, vocab, seed=vocab) + (1 - closeness) * random_logits(
        STATES, vocab, seed=77
    )


def drafter(kind: str, vocab: int, count: int) -> Any:
    reader = target(vocab)
    if kind in ("draft_model", "entropy"):
        small = AutomatonTarget(draft_logits(vocab, 0.5), max_rows=ROWS, max_length=16, page_size=4)
        stop = 0.52 if kind == "entropy" else 0.0  # about every second distribution of this draft is less certain
        return get_drafter("draft_model")(small, num_draft_tokens=count, pick="sampled", entropy_stop=stop)
    if kind == "sampled":
        table = draft_logits(vocab, 0.2)
        return SampledChain(lambda text: table[reader.state_after(text)], count)
    if kind == "deterministic":
        return DeterministicChain(lambda text: (3 * len(text) + text[-1]) % vocab, count)
    assert kind == "likeliest"
    return DeterministicChain(lambda text: int(reader.logits_after(text).argmax()), count)


def counts(engine: Engine, params: dict[str, Any], requests: int, count: int) -> Counter[tuple[int, ...]]:
    """Counts each text of three tokens. Texts are longer by a draft (`count`), so that none is cut
    by the end.
    """
    length = 3
    handles = [
        engine.submit(PROMPT, SamplingParams(seed=seed, max_new_tokens=length + count, **params))
        for seed in range(requests)
    ]
    while not engine.idle:
        engine.step()
    return Counter(tuple(handle.tokens[:length]) for handle in handles)


def exact(vocab: int, params: dict[str, Any], length: int = 3) -> dict[tuple[int, ...], float]:
    reader = target(vocab)
    settings = {"temperature": 1.0} | params
    return joint(lambda text: dist(reader.logits_after([*PROMPT, *text]), **settings), length, vocab)


CASES = [
    ("draft_model", 4, 3, {}, 6000),
    ("draft_model", 6, 2, {"temperature": 0.7, "top_k": 4}, 4000),
    ("entropy", 4, 3, {}, 6000),
    ("sampled", 5, 4, {"temperature": 1.5, "top_p": 0.9}, 3000),
    ("sampled", 4, 1, {"min_p": 0.15}, 3000),
    ("deterministic", 4, 2, {}, 4000),
    ("likeliest", 5, 3, {"temperature": 0.7}, 4000),
]


@pytest.mark.parametrize(("kind", "vocab", "count", "params", "requests"), CASES, ids=lambda value: str(value))
def test_rejection_keeps_the_joint_distribution(
    kind: str, vocab: int, count: int, params: dict[str, Any], requests: int
) -> None:
    engine = Engine(target(vocab), drafter(kind, vocab, count), rule="rejection")
    seen = counts(engine, params, requests, count)
    assert p_value(seen, exact(vocab, params)) > 1e-3
    alpha = engine.stats.alpha
    assert 0.1 < alpha < 0.98, "all accepted or all refused: the test would prove little"
    assert engine.stats.steps > requests, "texts must be made of several steps"
    assert sum(engine.stats.tested) > requests


def test_replay_keeps_the_joint_distribution_too() -> None:
    """The noise is a function of the seed; over seeds it has the right distribution."""
    small = AutomatonTarget(draft_logits(5, 0.5), max_rows=ROWS, max_length=16, page_size=4)
    engine = Engine(target(5), get_drafter("draft_model")(small, num_draft_tokens=3), rule="replay")
    assert p_value(counts(engine, {"temperature": 0.8}, 4000, 3), exact(5, {"temperature": 0.8})) > 1e-3
    assert engine.stats.alpha > 0.3


def test_distant_tokens_have_independent_uniforms() -> None:
    """The joint distribution of the first and the sixth token: uniforms of different steps are independent."""
    vocab = 4
    engine = Engine(target(vocab), drafter("draft_model", vocab, 2), rule="rejection")
    handles = [engine.submit(PROMPT, SamplingParams(seed=seed, max_new_tokens=9)) for seed in range(4000)]
    while not engine.idle:
        engine.step()
    pairs: dict[tuple[int, ...], float] = {}
    for text, chance in exact(vocab, {}, length=6).items():
        pairs[text[0], text[5]] = pairs.get((text[0], text[5]), 0.0) + chance
    assert p_value(Counter((h.tokens[0], h.tokens[5]) for h in handles), pairs) > 1e-3
