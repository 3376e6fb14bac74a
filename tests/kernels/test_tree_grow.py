"""tree_grow: whole trees on every backend, against trees grown with plain Python lists and sorting."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given as with_cases
from hypothesis import settings
from hypothesis import strategies as st
from oracles.growth import grown

from specdec_kernels import Growth, TreePlan, distribution_stats, tree_expand, tree_grow, use_backend
from specdec_kernels.dispatch import extension

BACKENDS = [
    "reference",
    pytest.param(
        "cpu", marks=pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
    ),
]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def dist(logits: torch.Tensor, top_k: int = 0) -> tuple[torch.Tensor, ...]:
    one = torch.ones(len(logits))
    inv_t, _, cut, tie = distribution_stats(logits, one, one.int() * top_k, one, one * 0)
    return inv_t, cut, tie


def by_hand(table: torch.Tensor, root: int, limit: int, depth: int, width: int) -> tuple[list[int], list[int], int]:
    """Returns tokens, parents and passes of a tree; the distribution after a node depends on its token alone."""
    found: list[tuple[float, int, int]] = []  # score, token, parent's number in here, -1: root
    front, passes = [(0.0, root, -1)], 0
    for _ in range(depth):
        if not front:
            break
        passes += 1
        level = []
        for score, token, number in front:
            logits = table[token : token + 1]
            one = torch.tensor([0, 1], dtype=torch.int32)
            tokens, scores, _ = tree_expand(logits, *dist(logits), one, torch.tensor([score]), width=width, keep=1)
            level += [(s, t, number) for t, s in zip(tokens[0].tolist(), scores[0].tolist(), strict=True) if t >= 0]
        level.sort(key=lambda each: -each[0])
        start = len(found)
        found += level
        least = sorted((score for score, *_ in found), reverse=True)[:limit]
        floor = least[-1] if len(least) == limit else -torch.inf
        numbered = [(score, token, start + at) for at, (score, token, _) in enumerate(level)]
        front = [each for each in numbered[:width] if each[0] > floor]
    best = sorted(sorted(range(len(found)), key=lambda at: -found[at][0])[:limit])
    place = {-1: 0, **{at: node for node, at in enumerate(best, 1)}}
    return [root, *(found[at][1] for at in best)], [-1, *(place[found[at][2]] for at in best)], passes


@every_backend
@pytest.mark.parametrize("seed", range(8))
def test_trees_are_those_of_plain_python(backend: str, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    table = torch.randn(12, 12, generator=source) * 2
    limits, depth, width = [7, 1, 20, 3], 1 + seed % 4, [1, 2, 4, 12][seed // 2]
    growth = Growth.room(torch.tensor(limits, dtype=torch.int32), 20, depth)
    growth.tokens[:, 0] = torch.tensor([1, 2, 3, 4])
    fronts, counts = [[1], [2], [3], [4]], [1] * 4
    passes = [0] * 4
    for level in range(depth):
        logits = table[[token for own in fronts for token in own]].reshape(-1, 12)
        offsets = torch.tensor([0, *torch.tensor([len(own) for own in fronts]).cumsum(0)], dtype=torch.int32)
        last = level == depth - 1
        with use_backend(backend):
            tokens, parents, (now, deepest), plan = tree_grow(
                logits, *dist(logits), offsets, growth, level=level, width=width, last=last
            )
        passes = [done + bool(own) for done, own in zip(passes, fronts, strict=True)]
        packed = tokens[: int(now.sum())].split(now.tolist())
        fronts = [own[before:].tolist() for own, before in zip(packed, counts, strict=True)]
        counts = now.tolist()
    above = parents[: int(now.sum())].split(now.tolist())
    ends = now.cumsum(0).tolist()
    for at, limit in enumerate(limits):
        want_tokens, want_parents, want_passes = by_hand(table, at + 1, limit, depth, width)
        assert packed[at].tolist() == want_tokens and above[at].tolist() == want_parents and passes[at] == want_passes
        assert int(deepest[at]) == int(plan.depth[ends[at] - int(now[at]) : ends[at]].max())
    assert (tokens[ends[-1] :] == 0).all() and (parents[ends[-1] :] == -1).all()


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
def test_backends_agree_on_ragged_trees_with_noise_and_filters() -> None:
    for seed in range(60):
        with use_backend("reference"):
            want = grown(seed)
        assert grown(seed) == want


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
@settings(max_examples=100, deadline=None, derandomize=True)
@with_cases(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    odd=st.booleans(),
)
def test_backends_agree_on_ties_broken_distributions_and_every_dtype(seed: int, dtype: torch.dtype, odd: bool) -> None:
    scores: dict[str, list[torch.Tensor]] = {"reference": [], "cpu": []}
    found = []
    for backend, own in scores.items():
        with use_backend(tree_grow=backend):
            found.append(grown(seed, dtype, odd, own))
    assert found[0] == found[1]
    rounding = 64 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for want, got in zip(*scores.values(), strict=True):
        torch.testing.assert_close(got, want, rtol=rounding, atol=4 * rounding)  # of values up to a hundred


@every_backend
def test_results_are_written_to_the_caller_s_memory(backend: str) -> None:
    logits, offsets = torch.randn(2, 50), torch.tensor([0, 1, 2], dtype=torch.int32)
    growth = Growth.room(torch.tensor([4, 3], dtype=torch.int32), 4, 1)
    growth.tokens[:, 0] = 7

    def grow(**given: Any) -> Any:
        return tree_grow(logits, *dist(logits), offsets, growth, level=0, width=2, last=True, **given)

    with use_backend(backend):
        *want, plan = grow()
        places = [torch.empty_like(part) for part in want]
        links = TreePlan(*(torch.empty_like(getattr(plan, each.name)) for each in fields(plan)))
        found = grow(out=(*places, links))
        assert found[0] is places[0] and found[3].depth is links.depth
        assert all(torch.equal(a, b) for a, b in zip(places, want, strict=True))
        assert all(torch.equal(getattr(links, each.name), getattr(plan, each.name)) for each in fields(plan))
        with pytest.raises(ValueError, match=r"tree_grow: out has 7 tensors; expected 8"):
            grow(out=(*places[:2], links))


@every_backend
def test_a_distribution_of_one_token_never_scores_above_its_parent(backend: str) -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(3)) * 9
    offsets, scores = torch.tensor([0, 200], dtype=torch.int32), -torch.rand(200)
    with use_backend(backend):
        _, found, _ = tree_expand(logits, *dist(logits, 1), offsets, scores, width=1, keep=1, sharpness=2.3)
    assert (found[:, 0] <= scores).all()


@every_backend
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": 2}, "level is 2 in a table of 9 columns; expected 0 to 1"),
        ({"level": 0}, r"trees grow from \[2\] nodes"),
        ({"width": 0}, "width is 0"),
        ({"seeds": torch.zeros(1, dtype=torch.int64)}, "got one of seeds and positions"),
        ({"limits": 5}, "a limit is 5; expected at most keep, 4"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"level": 1, "width": 2, "limits": 3, **change}
    growth = Growth.room(torch.tensor([given.pop("limits")], dtype=torch.int32), 4, 2)
    for part in (growth.tokens, growth.parents, growth.nodes, growth.scores):
        part.zero_()
    logits = torch.zeros(2, 5)
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    with use_backend(backend), pytest.raises(ValueError, match=f"tree_grow: {message}"):
        tree_grow(logits, *dist(logits), offsets, growth, **given)


@every_backend
def test_a_table_that_earlier_levels_did_not_write(backend: str) -> None:
    """Levels of another width leave more nodes than the table can hold; nothing is written beyond its end."""
    logits = torch.arange(64.0)[None] / 64
    growth = Growth.room(torch.tensor([8], dtype=torch.int32), 8, 3)
    growth.tokens[:, 0] = 1
    with use_backend(backend):
        tree_grow(logits, *dist(logits), torch.tensor([0, 1], dtype=torch.int32), growth, level=0, width=8)
        two = torch.full((2, 64), -50.0)
        two[:, 0] = 50.0  # a child with its parent's score continues
        with pytest.raises(ValueError, match="give levels in order, from 0 on, with one width"):
            tree_grow(two, *dist(two), torch.tensor([0, 2], dtype=torch.int32), growth, level=1, width=2)


@every_backend
def test_a_repeated_level_is_refused(backend: str) -> None:
    """Entries of later levels are not written beyond the space of an earlier one."""
    source = torch.Generator().manual_seed(0)
    growth = Growth.room(torch.tensor([32], dtype=torch.int32), 32, 4)
    growth.tokens[:, 0] = 1
    ends = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    with use_backend(backend):
        for level in range(4):
            logits = torch.randn(4 if level else 1, 64, generator=source) / 8
            tree_grow(logits, *dist(logits), ends[level > 0], growth, level=level, width=4, last=level == 3)
        with pytest.raises(ValueError, match="give levels in order, from 0 on, with one width"):
            tree_grow(logits, *dist(logits), ends[1], growth, level=1, width=4)
