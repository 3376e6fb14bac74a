"""EAGLE drafters: trees, distributions and arithmetic, over automata with a perfect, imperfect or small head."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits, scripted
from oracles.automaton_head import AutomatonHead
from oracles.chi_square import p_value
from oracles.distributions import dist, joint
from oracles.head_drafts import automaton, proposed

from specdec_fast import Engine, SamplingParams, get_drafter, load
from specdec_fast.draft_runners.head_trees import PUBLISHED
from specdec_fast.engine.state import DecodeState
from specdec_fast.heads.checkpoint import ASSETS
from specdec_fast.interfaces import Budget

NAMES = ("eagle", "eagle3")
CHAIN = (-1, 0, 1, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [CHAIN, None])
def test_a_head_that_is_the_target_gives_depth_plus_one_tokens_per_step(
    name: str, temperature: float, shape: Sequence[int] | None
) -> None:
    """This holds only with true features, tokens one place ahead of them, and every node after its parent."""
    target = automaton()
    made = get_drafter(name)(target, AutomatonHead(automaton()), depth=0 if shape else 3, width=4, shape=shape)
    prompts = [[1, 2], [3, 3, 0, 7, 1], [5] * 9]
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=21)
    for handle in Engine(target, made).generate(prompts, params):
        assert handle.stats.steps == -(-21 // 4) and handle.stats.faults == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_rerank_keeps_the_best_of_all_paths(name: str) -> None:
    """All 72 paths of two levels of eight tokens, scored in float64."""
    target, texts = automaton(), [[1, 2], [4, 4, 1, 7]]
    kept = list(range(8)) if name == "eagle" else [0, 2, 3, 5, 6]
    head = AutomatonHead(automaton(), kept=None if name == "eagle" else kept)
    draft = proposed(get_drafter(name)(target, head, depth=2, width=8, how="top_k"), target, texts, 11, temperature=0.8)
    draft.check(8)
    for at, text in enumerate(texts):
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        for length in range(2):
            for path in [path for path in scores if len(path) == length]:
                z = target.logits_after([*text, *path])[kept] / 0.8
                z = z - np.log(np.exp(z).sum())
                scores |= {(*path, token): scores[path] + own for token, own in zip(kept, z, strict=True)}
        best = sorted((path for path in scores if path), key=lambda path: -scores[path])[:11]
        start, stop = draft.offsets[at], draft.offsets[at + 1]
        tokens, parents = draft.tokens[start:stop].tolist(), draft.parents[start:stop].tolist()
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        assert set(paths[1:]) == set(best)
        assert all(path[:-1] in paths for path in paths[1:]), "a node without its parent"


def test_the_tree_of_eagle_1_is_the_published_one() -> None:
    depths = [0]
    for parent in PUBLISHED.parents[1:]:
        depths.append(depths[parent] + 1)
    assert Counter(depths) == {0: 1, 1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    assert [len(each) for each in PUBLISHED.children(25)][:5] == [4, 3, 2, 2, 1]


DIST = [
    ("eagle", "sampled", None, {}),
    ("eagle3", "sampled", (0, 2, 3), {"temperature": 1.4}),
    ("eagle", "hybrid", (1, 3), {}),
]


@pytest.mark.parametrize(("name", "how", "kept", "params"), DIST)
def test_the_distribution_of_three_tokens_is_the_target_s(
    name: str, how: str, kept: Sequence[int] | None, params: dict[str, Any]
) -> None:
    """Siblings are sampled without replacement (or one of them is), also from a reduced vocabulary."""
    table = random_logits(7, 4, seed=4)
    believed = AutomatonTarget(0.3 * table + 0.7 * random_logits(7, 4, seed=77), max_rows=500, max_length=16)
    target = AutomatonTarget(table, max_rows=500, max_length=16, page_size=4)
    made = get_drafter(name)(target, AutomatonHead(believed, kept), how=how, depth=0, shape=(-1, 0, 0, 1, 1, 2))
    assert made.needs.dists
    engine = Engine(target, made, rule="recursive_rejection")
    handles = [engine.submit([1, 2], SamplingParams(seed=at, max_new_tokens=5, **params)) for at in range(2000)]
    while not engine.idle:
        engine.step()
    settings = {"temperature": 1.0} | params
    exact = joint(lambda text: dist(target.logits_after([1, 2, *text]), **settings), 3, 4)
    assert p_value(Counter(tuple(handle.tokens[:3]) for handle in handles), exact) > 1e-3
    assert 0.2 < engine.stats.tau - 1 < 2.5 and engine.stats.faults == 0


@pytest.mark.parametrize("name", NAMES)
def test_token_0_is_an_ordinary_token(name: str) -> None:
    """A text of zeros with an end in it: padding after a path is not taken for tokens."""
    script = [0, 0, 0, 0, 5, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    target = scripted(script, 8)
    for head in (scripted(script, 8), scripted([0] * 20, 8), scripted([5, 3] * 10, 8)):
        for depth, shape in ((4, None), (0, None), (0, CHAIN)):
            made = get_drafter(name)(target, AutomatonHead(head), depth=depth, width=3, shape=shape)
            handle = Engine(target, made).generate([[0, 0]], SamplingParams(temperature=0, max_new_tokens=16))[0]
            assert handle.tokens == script[2:18]


def test_a_row_without_features_gets_no_draft_and_no_fault() -> None:
    target = automaton()
    made = get_drafter("eagle")(target, AutomatonHead(automaton()))
    state = DecodeState(4, 64)
    rows = [state.join([1, 2, 3], SamplingParams(seed=at), 3, ()) for at in range(2)]
    made.begin(state, rows, None)
    with torch.inference_mode():
        draft = made.propose(state, rows, Budget([6, 6]), state.rng(rows))
    assert draft.counts == (1, 1)
    handle = Engine(target, made := get_drafter("eagle")(target, AutomatonHead(automaton()))).generate(
        [[3]], SamplingParams(temperature=0, max_new_tokens=11)
    )[0]
    assert handle.stats.faults == 0 and handle.stats.steps < 5, "after the first step the features are known"


def test_a_step_that_is_observed_twice_counts_once() -> None:
    """This happens if another drafter of a forest fails on a row, and rows are observed again one by one."""
    target = automaton()
    made = get_drafter("eagle")(target, AutomatonHead(automaton()), depth=3, width=4)
    once = made.observe
    made.observe = lambda *step: (once(*step), once(*step))
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=21)
    for handle in Engine(target, made).generate([[1, 2], [3, 3, 0, 7, 1], [4]], params):
        assert handle.stats.steps <= -(-21 // 4) + 1 and handle.stats.faults == 0


def test_preempted_rows_start_anew() -> None:
    """In a pool that is too small for all, rows are recomputed together with their features."""
    prompts, params = [[at % 8] * 6 for at in range(6)], SamplingParams(temperature=0.9, seed=2, max_new_tokens=24)
    want = [handle.tokens for handle in Engine(automaton()).generate(prompts, params)]
    target = automaton(num_pages=24, page_size=4)
    engine = Engine(target, get_drafter("eagle")(target, AutomatonHead(automaton(seed=5)), num_draft_tokens=4))
    handles = engine.generate(prompts, params)
    assert [handle.tokens for handle in handles] == want
    assert sum(handle.stats.preemptions for handle in handles) > 0 and engine.stats.faults == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "head: got none; expected -o head="),
        ({"head": "/no/such/folder"}, "expected a folder with config.json"),
        ({"how": "best"}, "how: got 'best'"),
        ({"how": "hybrid"}, "depth: got 5 with how=hybrid"),
        ({"depth": 2, "shape": (-1, 0)}, "depth: got 2 with a shape"),
        ({"width": 0}, "expected depth >= 0 and width >= 1"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: got 0"),
    ],
)
def test_errors_of_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    target = models.target("llama", max_rows=2) if isinstance(options.get("head"), str) else automaton()
    given = options if "head" in options or not options else {"head": AutomatonHead(automaton()), **options}
    with pytest.raises(ValueError, match=message):
        get_drafter(name)(target, **given)


@pytest.mark.parametrize("name", NAMES)
def test_the_bundled_heads_work_out_of_the_box(name: str) -> None:
    """The text of the bundled target, greedy and replayed, in fewer passes; `recursive_rejection` works too."""
    plain = load("demo-target", drafter="none", max_rows=2, max_length=128)
    engine = load("demo-target", drafter=name, max_rows=2, max_length=128)
    prompts = ["def main(", "And it came to pass"]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=48, ignore_eos=True)
        handles = engine.generate(prompts, params)
        assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain.generate(prompts, params)]
    assert engine.stats.tau > 2.0 and engine.stats.faults == 0
    sampled = load(
        "demo-target", drafter=name, drafter_options={"depth": 0}, rule="traversal", max_rows=2, max_length=128
    )
    sampled.generate(prompts, SamplingParams(temperature=1.0, seed=3, max_new_tokens=48, ignore_eos=True))
    assert sampled.stats.tau > 1.5 and sampled.stats.faults == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_bundled_heads_have_a_model_card(name: str) -> None:
    place = ASSETS / f"demo-{name}"
    config, card = (place / "config.json").read_text(), (place / "README.md").read_text()
    facts = json.loads(config)["training"]
    assert sum(path.stat().st_size for path in place.iterdir()) < 1.5e6
    for fact in (f"--steps {facts['step']}", f"{facts['accepted_1']:.2f}", f"{facts['tokens_per_step']:.2f}"):
        assert fact in card
