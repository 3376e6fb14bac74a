"""typical_verify: every backend on trees written by hand, C++ against the reference on random ones, bad arguments."""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from oracles.typical_cases import typical_trees
from torch import Tensor

from specdec_kernels import distribution_stats, tree_plan, typical_verify, use_backend
from specdec_kernels.dispatch import extension

BUILT = extension.unavailable_reason() is None
BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not BUILT, reason="CPU extension not built"))]


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dist(logits: Tensor, temperature: float = 1.0, top_k: int = 0) -> tuple[Tensor, ...]:
    one = torch.ones(len(logits))
    return (logits, *distribution_stats(logits, one * temperature, one.int() * top_k, one, one * 0))


def call(
    parents: list[int], tokens: list[int], target: tuple[Tensor, ...], score_only: Any = None, **options: Any
) -> Any:
    bounds = int32([0, len(tokens)])
    plan = tree_plan(int32(parents), bounds)
    settings = {"epsilon": 0.09, "delta": 0.3, "max_depth": len(tokens), **options}
    tree = (torch.tensor(tokens), bounds, plan.first_child, plan.next_sibling)
    return typical_verify(*tree, target, score_only, torch.tensor([3]), int32([5]), **settings)


def nodes(path: Tensor) -> list[int]:
    return path[0][path[0] >= 0].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_longest_path_of_typical_tokens(backend: str) -> None:
    """p = (0.7, 0.2, 0.1) everywhere; root -> 0, 1, 2; below 1 -> 0; below 2 -> 0 -> 0."""
    p = torch.tensor([0.7, 0.2, 0.1])
    limit = 0.3 * exp(float((p * p.log()).sum()))
    assert 0.1 < limit < 0.2
    target = dist(p.log().expand(7, 3).contiguous())
    tree = [-1, 0, 0, 0, 2, 3, 5], [0, 0, 1, 2, 0, 0, 0]
    score_only = torch.tensor([False, False, False, False, True, False, False])
    with use_backend(backend):
        assert nodes(call(*tree, target, epsilon=0.5)[0]) == [0, 2, 4]  # 2 is not typical, 1 is
        assert nodes(call(*tree, target, epsilon=0.09)[0]) == [0, 3, 5, 6]
        assert nodes(call(*tree, target, epsilon=0.5, delta=1.0)[0]) == [0, 1]
        assert nodes(call(*tree, target, score_only, epsilon=0.5)[0]) == [0, 1], (
            "a score-only node is never kept; the first of equals is"
        )
        even = dist(torch.zeros(7, 3))
        assert nodes(call(*tree, even, epsilon=0.5, delta=1.0)[0]) == [0], "strictly above"
        greedy = dist(p.log().expand(7, 3).contiguous(), temperature=0.0)
        path, accepted, token = call(*tree, greedy)
        assert nodes(path) == [0, 1] and accepted.tolist() == [1] and token.tolist() == [0]


@pytest.mark.skipif(not BUILT, reason="CPU extension not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [1, 7, 1024, 1025, 3000])
def test_backends_agree(dtype: torch.dtype, vocab: int) -> None:
    source = torch.Generator().manual_seed(vocab)
    counts = [1, 9, 0, 14]
    bounds = int32([0, *torch.tensor(counts).cumsum(0).tolist()])
    parents = [-1 if i == 0 else int(torch.randint(i, (1,), generator=source)) for n in counts for i in range(n)]
    plan = tree_plan(int32(parents), bounds)
    logits = (torch.randn(sum(counts), vocab, generator=source) * 3).to(dtype)
    above = [start + parent for n, start in zip(counts, bounds.tolist()) for parent in parents[start : start + n]]
    likely = logits.float().argsort(1, descending=True)
    tokens = torch.tensor([int(likely[max(parent, 0), at % min(3, vocab)]) for at, parent in enumerate(above)])
    target = dist(logits, temperature=0.8, top_k=min(vocab, 50))
    seeds, positions = torch.arange(4), int32([3, 4, 5, 6])
    found = []
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            found.append(
                typical_verify(
                    tokens, bounds, plan.first_child, plan.next_sibling, target, None, seeds, positions,
                    epsilon=0.2, delta=0.6, max_depth=14,
                )
            )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][2].tolist()[2] == -1 and found[0][0][2].eq(-1).all(), "a row without nodes"
    assert vocab == 1 or found[0][1].sum() > 0


@pytest.mark.skipif(not BUILT, reason="CPU extension not built")
@examples(max_examples=120, deadline=None, derandomize=True)
@given(typical_trees())
def test_backends_agree_on_ragged_trees_of_any_distributions(case: dict[str, Any]) -> None:
    found = []
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            found.append(typical_verify(**case))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))
    rows = case["offsets"].diff().tolist()
    assert all(found[0][2].tolist()[row] == -1 for row, count in enumerate(rows) if count == 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": -0.1}, "epsilon is -0.1; expected 0 or more"),
        ({"delta": float("nan")}, "delta is nan; expected 0 or more"),
        ({"max_depth": 1}, "max_depth"),
    ],
)
def test_invalid_arguments(backend: str, options: dict[str, float], words: str) -> None:
    with use_backend(backend), pytest.raises(ValueError, match=words):
        call([-1, 0, 1], [0, 0, 0], dist(torch.zeros(3, 2)), **options)
