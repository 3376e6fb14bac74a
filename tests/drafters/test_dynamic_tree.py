"""Dynamic trees, and trees with a shape from a file, against all paths scored in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits, scripted

from specdec_fast import SamplingParams, get_drafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget, Needs
from specdec_fast.trees.static_shape import Shape, write_shape
from specdec_kernels.random import replay_noise


@pytest.mark.parametrize("how", ["top_k", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sharpness", [1.0, 2.5])
def test_a_dynamic_tree_holds_the_best_of_all_paths(how: str, temperature: float, sharpness: float) -> None:
    """Every path of three tokens is scored in float64; the drafter looks at eight nodes per level and keeps seven."""
    model = AutomatonTarget(random_logits(23, 8, seed=4))
    state = DecodeState(6, 64)
    prompts = [[1], [2, 3], [4, 4, 1, 7]]
    rows = [
        state.join(prompt, SamplingParams(seed=11 + at, temperature=temperature), len(prompt), ())
        for at, prompt in enumerate(prompts)
    ]
    made = get_drafter("draft_tree")(model, depth=3, width=8, how=how, sharpness=sharpness)
    made.begin(state, rows, None)
    with torch.inference_mode():
        draft = made.propose(state, rows, Budget([7, 5, 7]), state.rng(rows))
    draft.check(8)
    assert draft.dists is None and made.needs == Needs(topology="tree", own_cache=True, vocab_size=8)
    bounds = draft.offsets.tolist()
    for at, (prompt, count) in enumerate(zip(prompts, (7, 5, 7), strict=True)):
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        for length in range(3):
            for path in [path for path in scores if len(path) == length]:
                logits = model.logits_after([*prompt, *path])
                z = logits / (temperature or 1.0)
                if how == "coupled" and temperature:
                    position = torch.tensor([len(prompt) + length], dtype=torch.int32)
                    z = z + replay_noise(torch.tensor([11 + at]), position, 8)[0].double().numpy()
                z = sharpness * z
                z = z - np.log(np.exp(z - z.max()).sum()) - z.max()
                scores |= {(*path, token): scores[path] + z[token] for token in range(8)}
        best = sorted((path for path in scores if path), key=lambda path: -scores[path])[:count]
        start, stop = bounds[at], bounds[at + 1]
        tokens, parents = draft.tokens[start:stop].tolist(), draft.parents[start:stop].tolist()
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        assert set(paths[1:]) == set(best)


def test_a_dynamic_tree_stops_growing_when_no_better_node_can_follow() -> None:
    """Four nodes: a confident draft grows a chain to the end, and a uniform one stops after one pass."""
    sure = scripted([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 8)
    uncertain = AutomatonTarget(torch.zeros(23, 8))
    for model, passes in ((sure, 4), (uncertain, 1)):
        state = DecodeState(6, 64)
        row = state.join([1], SamplingParams(seed=1, temperature=0), 1, ())
        made = get_drafter("draft_tree")(model, depth=5, width=4, how="top_k")
        made.begin(state, [row], None)
        with torch.inference_mode():
            draft = made.propose(state, [row], Budget([4]), state.rng([row]))
        assert model.passes == passes and draft.num_nodes == 5
        assert draft.max_depth == (4 if model is sure else 1)


def test_a_shape_from_a_file_is_filled_by_rank(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    write_shape(path, Shape((-1, 0, 0, 1, 3, 1)), {})
    model = AutomatonTarget(random_logits(23, 8, seed=4))
    state = DecodeState(6, 64)
    row = state.join([1, 2], SamplingParams(seed=3, temperature=0), 2, ())
    made = get_drafter("draft_tree")(model, shape=str(path), how="top_k")
    assert made.num_draft_tokens == 5
    made.begin(state, [row], None)
    with torch.inference_mode():
        draft = made.propose(state, [row], Budget([5]), state.rng([row]))
        short = made.propose(state, [row], Budget([3]), state.rng([row]))

    def ranked(text: list[int]) -> list[int]:
        return np.argsort(-model.logits_after(text), kind="stable").tolist()

    first, second = ranked([1, 2])[:2]
    below = ranked([1, 2, first])
    assert draft.tokens.tolist() == [2, first, second, *below[:2], ranked([1, 2, first, below[0]])[0]]
    assert draft.parents.tolist() == [-1, 0, 0, 1, 1, 3]
    assert short.tokens.tolist() == [2, first, second, below[0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": -1}, "depth, width: got -1, 8"),
        (
            {"depth": 3, "how": "hybrid"},
            "depth: got 3 with how=hybrid; expected depth=0, or no shape and how=coupled or",
        ),
        ({"depth": 3, "shape": [-1, 0]}, "depth: got 3 with a shape"),
    ],
)
def test_dynamic_trees_refuse_what_would_not_be_lossless(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"draft_tree {message}"):
        get_drafter("draft_tree")(AutomatonTarget(random_logits(23, 8, seed=4)), **options)
