"""The law of two tokens through the whole engine, for drafters whose drafts follow from the past of their request: from
what they observed, how much was accepted, what was written before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.laws import joint, law

import specdec_fast.drafters.draft_model as draft_model_module
import specdec_fast.drafters.layer_skip as layer_skip_module
from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.budget import MovingThreshold

STATES, VOCAB, ROWS, SEEDS = 7, 4, 500, 2000
PROMPT = [1, 2, 1, 3, 1, 2]
WRITTEN = 4  # tokens before the two that are counted, for the drafter to learn from


def target(close: float = 1.0) -> AutomatonTarget:
    """close: how much of another table's logits is mixed in, 1 for none."""
    tables = (random_logits(STATES, VOCAB, seed=seed, std=1.0) for seed in (7, 77))
    logits = close * next(tables) + (1 - close) * next(tables)
    return AutomatonTarget(logits, max_rows=ROWS, max_length=24, page_size=4)


def layer_skip(stop: str) -> Callable[[AutomatonTarget], Any]:
    return lambda own: get_drafter("layer_skip")(
        own, exit_after=0, pick="drawn", stop=stop, threshold=0.5, goal=0.6, num_draft_tokens=4
    )


def moving_stop(own: AutomatonTarget) -> Any:
    return get_drafter("draft_model")(target(0.5), pick="drawn", num_draft_tokens=4, entropy_stop=0.5, entropy_goal=0.6)


CASES: dict[str, tuple[str, Callable[[AutomatonTarget], Any]]] = {
    "layer_skip, threshold": ("token", layer_skip("threshold")),
    "layer_skip, adaptive": ("token", layer_skip("adaptive")),
    "draft_model, moving entropy stop": ("token", moving_stop),
    "jacobi": ("token", lambda own: get_drafter("jacobi")(num_draft_tokens=4)),
    "lookahead": ("tree", lambda own: get_drafter("lookahead")(window=2, ngram=3, guesses=2)),
    "suffix": ("tree", lambda own: get_drafter("suffix")(num_draft_tokens=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_two_tokens_behind_a_text_have_the_target_s_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of the first two tokens and of the fifth and sixth, over all seeds."""
    quick = partial(MovingThreshold, step=0.3, keep_threshold=0.0)  # what was accepted soon tells in lengths of drafts
    monkeypatch.setattr(draft_model_module, "MovingThreshold", quick)
    monkeypatch.setattr(layer_skip_module, "MovingThreshold", quick)
    rule, make = CASES[name]
    own = target()
    engine = Engine(own, make(own), rule=rule)
    params = [SamplingParams(seed=seed, max_new_tokens=WRITTEN + 6) for seed in range(SEEDS)]
    handles = engine.generate([PROMPT] * SEEDS, params)
    seen = [Counter(tuple(own.tokens[at : at + 2]) for own in handles) for at in (0, WRITTEN)]
    exact: list[dict[tuple[int, ...], float]] = [{}, {}]
    for text, chance in joint(lambda text: law(own.logits_after([*PROMPT, *text]), 1.0), WRITTEN + 2, VOCAB).items():
        for at, known in zip((0, WRITTEN), exact):
            known[text[at : at + 2]] = known.get(text[at : at + 2], 0.0) + chance
    assert all(p_value(*pair) > 1e-3 for pair in zip(seen, exact, strict=True))
    assert 0.1 < engine.stats.mean_alpha < 0.9, "all accepted or all refused: the test would prove little"
    assert engine.stats.drafted > SEEDS
