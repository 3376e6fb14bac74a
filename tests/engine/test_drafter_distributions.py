"""The distribution of tokens through the whole engine, for drafters that learn.

Their drafts follow from the past of their request (observations, acceptance, text) and of other requests of the same
seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.distributions import dist, joint

import specdec_fast.drafters.draft_model as draft_model_module
import specdec_fast.drafters.layer_skip as layer_skip_module
from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.adaptive.budget import Entropy, Fixed, Goodput, MovingThreshold
from specdec_fast.engine.drafter_runner import DrafterRunner
from specdec_fast.engine.request import Handle

STATES, VOCAB, ROWS, SEEDS = 7, 4, 500, 2000
PROMPT = [1, 2, 1, 3, 1, 2]
WRITTEN = 4  # tokens before the two counted ones, from which the drafter learns


def target(close: float = 1.0) -> AutomatonTarget:
    """close: share of the target's own logits; the rest comes from another table."""
    tables = (random_logits(STATES, VOCAB, seed=seed, std=1.0) for seed in (7, 77))
    logits = close * next(tables) + (1 - close) * next(tables)
    return AutomatonTarget(logits, max_rows=ROWS, max_length=24, page_size=4)


def layer_skip(stop: str) -> Callable[[AutomatonTarget], Any]:
    return lambda own: get_drafter("layer_skip")(
        own, exit_after=0, pick="sampled", stop=stop, threshold=0.5, goal=0.6, num_draft_tokens=4
    )


def moving_stop(own: AutomatonTarget) -> Any:
    return get_drafter("draft_model")(
        target(0.5), pick="sampled", num_draft_tokens=4, entropy_stop=0.5, entropy_goal=0.6
    )


CASES: dict[str, tuple[str, Callable[[AutomatonTarget], Any]]] = {
    "layer_skip, threshold": ("rejection", layer_skip("threshold")),
    "layer_skip, adaptive": ("rejection", layer_skip("adaptive")),
    "draft_model, moving entropy stop": ("rejection", moving_stop),
    "jacobi": ("rejection", lambda own: get_drafter("jacobi")(num_draft_tokens=4)),
    "lookahead": ("recursive_rejection", lambda own: get_drafter("lookahead")(window=2, ngram=3, guesses=2)),
    "suffix": ("recursive_rejection", lambda own: get_drafter("suffix")(num_draft_tokens=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_two_tokens_after_a_text_have_the_target_s_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of the first two tokens, and of the fifth and sixth, over all seeds."""
    quick = partial(MovingThreshold, step=0.3, keep_threshold=0.0)  # acceptance soon changes the lengths of drafts
    monkeypatch.setattr(draft_model_module, "MovingThreshold", quick)
    monkeypatch.setattr(layer_skip_module, "MovingThreshold", quick)
    rule, make = CASES[name]
    own = target()
    engine = Engine(own, make(own), rule=rule)
    params = [SamplingParams(seed=seed, max_new_tokens=WRITTEN + 6) for seed in range(SEEDS)]
    handles = engine.generate([PROMPT] * SEEDS, params)
    seen = [Counter(tuple(own.tokens[at : at + 2]) for own in handles) for at in (0, WRITTEN)]
    exact: list[dict[tuple[int, ...], float]] = [{}, {}]
    for text, chance in joint(lambda text: dist(own.logits_after([*PROMPT, *text]), 1.0), WRITTEN + 2, VOCAB).items():
        for at, known in zip((0, WRITTEN), exact):
            known[text[at : at + 2]] = known.get(text[at : at + 2], 0.0) + chance
    assert all(p_value(*pair) > 1e-3 for pair in zip(seen, exact, strict=True))
    assert 0.1 < engine.stats.alpha < 0.9, "all accepted or all refused: the test would prove little"
    assert engine.stats.num_draft_tokens > SEEDS


def adaptive_forest() -> Any:
    """Two draft models that share one node of budget. It goes to the better one so far, over all requests."""
    models = [AutomatonTarget(mixed(seed), max_rows=2, max_length=16) for seed in (1, 2)]
    made = [get_drafter("draft_model")(model, num_draft_tokens=3, pick="sampled") for model in models]
    return get_drafter("forest")(made, num_draft_tokens=1)


def mixed(seed: int) -> Any:
    return 0.3 * random_logits(STATES, 3, seed=5) + 0.7 * random_logits(STATES, 3, seed=seed)


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed by request", "by the seed alone"])
def test_requests_of_one_seed_share_no_uniforms_where_one_learns_from_the_other(
    keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of the second request, over seeds. Keyed by the seed alone, its distribution is wrong."""
    if not keyed:
        monkeypatch.setattr(DrafterRunner, "params_with_request_key", lambda self, handle: handle.params)
    own = AutomatonTarget(random_logits(STATES, 3, seed=5), max_rows=2, max_length=16)
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(800):
        engine = Engine(own, adaptive_forest(), rule="recursive_rejection")
        for _ in range(2):
            (handle,) = engine.generate([[1]], SamplingParams(seed=seed, max_new_tokens=2))
        seen[handle.tokens[0],] += 1
    p = p_value(seen, joint(lambda text: dist(own.logits_after([1, *text]), 1.0), 1, 3))
    assert p > 1e-3 if keyed else p < 1e-3


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed by prompt", "by the seed alone"])
def test_requests_of_one_seed_share_no_uniforms_where_one_preempts_the_other(
    keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted request's drafter starts anew, so its drafts depend on the other request's acceptance. Counted are
    the second and third token of the second request.
    """
    if not keyed:
        monkeypatch.setattr(DrafterRunner, "params_with_request_key", lambda self, handle: handle.params)
    logits = torch.tensor([[0.45, 0.5, 0.05], [0.5, 0.3, 0.2], [0.3, 0.5, 0.2]]).log()
    following = torch.arange(3).expand(3, 3).contiguous()
    own = AutomatonTarget(logits, following, max_rows=4, max_length=32, page_size=1, num_pages=14)
    seen: Counter[tuple[int, ...]] = Counter()
    preempted = 0
    for seed in range(2000):
        drafter = get_drafter("recycling")(num_draft_tokens=2, shared=False)
        engine = Engine(own, drafter, rule="recursive_rejection", prefix_sharing=False)  # it would save the pages
        params = SamplingParams(seed=seed, max_new_tokens=8)
        both = [engine.submit(prompt, params) for prompt in ([0, 1, 1], [0, 1])]
        while len(both[1].tokens) < 3:  # tokens behind the counted ones would take two thirds of the time
            engine.step()
        seen[tuple(both[1].tokens[1:3])] += 1
        preempted += both[1].stats.preemptions > 0
        for handle in both:
            engine.cancel(handle)
    assert preempted > 200
    exact: dict[tuple[int, ...], float] = {}
    for text, chance in joint(lambda text: dist(own.logits_after([0, 1, *text]), 1.0), 3, 3).items():
        exact[text[1:]] = exact.get(text[1:], 0.0) + chance
    p = p_value(seen, exact)
    assert p > 1e-3 if keyed else p < 1e-3


class Learning(Fixed):
    """A drafter that does not keep what its base class declares."""


SHARED: dict[str, tuple[Callable[[], Any], Any, str, bool]] = {
    "forest, recursive_rejection": (adaptive_forest, Fixed(), "recursive_rejection", True),
    "forest, replay": (adaptive_forest, Fixed(), "replay", False),
    "forest, greedy": (adaptive_forest, Fixed(), "greedy", False),
    "shared suffix, traversal": (lambda: get_drafter("suffix")(shared=True), Fixed(), "traversal", True),
    "suffix, recursive_rejection": (lambda: get_drafter("suffix")(), Fixed(), "recursive_rejection", False),
    "shared recycling, recursive_rejection": (
        lambda: get_drafter("recycling")(shared=True),
        Fixed(),
        "recursive_rejection",
        True,
    ),
    "recycling, recursive_rejection": (lambda: get_drafter("recycling")(), Fixed(), "recursive_rejection", False),
    "goodput, rejection": (lambda: get_drafter("ngram")(), Goodput(), "rejection", True),
    "goodput, replay": (lambda: get_drafter("ngram")(), Goodput(), "replay", False),
    "ngram, rejection": (lambda: get_drafter("ngram")(), Fixed(), "rejection", False),
    "ngram, rejection, a budget that is derived": (lambda: get_drafter("ngram")(), Learning(), "rejection", True),
    "draft_model, entropy": (lambda: moving_stop(target()), Entropy(), "rejection", False),
}


@pytest.mark.parametrize("name", SHARED)
def test_keys_of_uniforms(name: str) -> None:
    """They are keyed by the prompt if the rule uses any, and by the request's number if the drafter says so or an equal
    request runs.
    """
    make, budget, rule, numbered = SHARED[name]
    engine = Engine(target(), make(), rule=rule, budget=budget)
    keyed, running, tosses = (
        engine._drafter_runner.params_with_request_key,
        engine._running,
        rule not in ("replay", "greedy"),
    )
    params = SamplingParams(seed=7)
    first, second, other = (Handle(number, prompt, params, 1) for number, prompt in enumerate(([1], [1], [2])))
    assert keyed(first) == keyed(first) and (keyed(first) == params) == (not tosses)
    assert (keyed(second) != keyed(first)) == numbered and (keyed(other) != keyed(first)) == tosses
    running[0], twin = first, Handle(3, [1], params, 1)
    before = keyed(first), keyed(second)
    assert (keyed(twin) != keyed(first)) == tosses and before == (keyed(first), keyed(second))
    for each in (first, second, other, twin):
        seed = keyed(each).seed
        assert seed is not None and 0 <= seed < 2**61
    first.finish("cancelled")
    engine._drafter_runner.release([])
    assert set(engine._drafter_runner._keyed_params) == ({second, other, twin} if tosses else set())
