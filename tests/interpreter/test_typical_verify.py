"""typical_verify in Triton: the reference's path and token on ragged trees, ties, broken rows and links, deep trees."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded_case
from oracles.proposal_cases import dist, int32, proposals
from torch import Tensor

from specdec_kernels import tree_plan, typical_verify, use_backend
from specdec_kernels.dispatch import argument_checks
from specdec_kernels.ops.typical_verify import launch

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]
TAKEN = ("offsets", "first_child", "next_sibling", "target", "score_only", "seeds", "root_positions")


def parents_of(first_child: Tensor, next_sibling: Tensor) -> Tensor:
    """Returns the parent of every node; a root is its own."""
    parents, sibling = list(range(len(first_child))), next_sibling.tolist()
    for node, child in enumerate(first_child.tolist()):
        while child >= 0:
            parents[child], child = node, sibling[child]
    return torch.tensor(parents, dtype=torch.int64)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Returns ragged rows whose tokens are often among the likeliest after their parents."""
    case = draw(proposals(HALF_AND_SINGLE))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    tokens, logits = case["tokens"], case["target"][0].float()
    if len(tokens):
        likeliest = logits.topk(min(4, logits.shape[1])).indices[parents_of(case["first_child"], case["next_sibling"])]
        pick = torch.randint(0, likeliest.shape[1], (len(tokens), 1), generator=g)
        tokens = torch.where(torch.rand(len(tokens), generator=g) < 0.8, likeliest.gather(1, pick)[:, 0], tokens)
    limit = {"epsilon": draw(st.sampled_from([0.0, 0.01, 0.09, 0.6])), "delta": draw(st.sampled_from([0.03, 0.3, 0.7]))}
    return {"tokens": tokens, **{name: case[name] for name in TAKEN}, **limit, "max_depth": 6}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(trees(), st.sampled_from([2, 64]), st.sampled_from([1024, 8192]))
def test_kernel_equals_reference(case: dict[str, Any], tile: int, piece: int) -> None:
    with use_backend("reference"):
        want = typical_verify(**case)
    with use_backend("triton"), patch.multiple(launch, TILE=tile, PIECE=piece):
        got = typical_verify(**guarded_case(case))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def forest(counts: list[int], vocab: int, **more: Any) -> dict[str, Any]:
    """Returns random trees in any order with parents before children; all tokens have weight."""
    g = torch.Generator().manual_seed(vocab)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    parents = [int(torch.randint(i, (1,), generator=g)) if i else -1 for count in counts for i in range(count)]
    plan = tree_plan(int32(parents), offsets)
    nodes = len(parents)
    return {
        "tokens": torch.randint(0, vocab, (nodes,), generator=g),
        "offsets": offsets,
        "first_child": plan.first_child,
        "next_sibling": plan.next_sibling,
        "target": dist(torch.randn(nodes, vocab, generator=g)),
        "score_only": None,
        "seeds": torch.arange(len(counts)) + 3,
        "root_positions": torch.arange(len(counts)).int(),
        "epsilon": 0.0,
        "delta": 0.3,
        "max_depth": int(plan.depth.max()),
    } | more


@pytest.mark.parametrize(
    ("counts", "vocab", "epsilon"),
    [([1, 150, 0, 70], 7, 0.0), ([150], 5, 0.12), ([4, 3], 20_001, 0.00005)],
)
def test_long_rows_and_a_large_vocabulary(counts: list[int], vocab: int, epsilon: float) -> None:
    """At epsilon 0 every token is typical, so the longest path is as deep as its tree."""
    case = forest(counts, vocab, epsilon=epsilon)
    with use_backend("reference"):
        want = typical_verify(**case)
    with use_backend("triton"):
        got = typical_verify(**case)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert epsilon or int(got[1].max()) == case["max_depth"] >= 8


def test_no_path_contains_score_only_nodes() -> None:
    case = forest([90, 1, 2, 40], 7)
    case["score_only"] = torch.rand(133, generator=torch.Generator().manual_seed(0)) < 0.4
    with use_backend("reference"):
        want = typical_verify(**case)
    with use_backend("triton"), patch.object(launch, "TILE", 32):
        got = typical_verify(**guarded_case(case))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    score_only, steps, longest = case["score_only"].tolist(), [0] * 133, 0
    parents = parents_of(case["first_child"], case["next_sibling"]).tolist()
    for node in range(1, 90):
        known = not (score_only[node] or score_only[parents[node]]) and parents[node] > 0
        steps[node] = steps[parents[node]] + 1 if known else 0
        longest = max(longest, steps[node])
    assert longest > int(want[1][0]) > 0, "a longer way that does not begin at the root"


def test_strictly_above_the_limit_and_rows_without_a_distribution() -> None:
    """A greedy distribution has one token of weight 1 and entropy 0; a broken distribution has no token."""
    offsets, child, none = int32([0, 2]), int32([1, -1]), int32([-1, -1])
    keys = (None, torch.tensor([4]), int32([1]))

    def kept(target: tuple[Tensor, ...], epsilon: float, delta: float) -> tuple[int, int]:
        tree = (torch.tensor([0, 2]), offsets, child, none)
        path, accepted, token = typical_verify(*tree, target, *keys, epsilon=epsilon, delta=delta, max_depth=1)
        assert path.tolist() == [[0, 1] if accepted else [0, -1]]
        return int(accepted), int(token)

    greedy = dist(torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]), 0.0)
    broken = dist(torch.full((2, 3), float("nan")))
    masked = dist(torch.tensor([[0.0, -torch.inf, -torch.inf]] * 2))
    for backend in ("reference", "triton"):
        with use_backend(backend):
            assert kept(greedy, 1.0, 1.0) == (0, 2)
            assert kept(greedy, 1.0, 0.999) == kept(greedy, 0.999, 1.0) == (1, 0)
            assert kept(broken, 0.0, 0.0) == (0, 0)
            assert kept(masked, 0.0, 0.0) == (0, 0)


def test_the_entropy_counts_tokens_after_the_cut() -> None:
    """Ten of 3,000 tokens of equal weight are left: their entropy is log 10, not log 3,000."""
    one = torch.ones(2)
    level = torch.zeros(2, 3000)
    inv_t, lse = one, one * torch.tensor(10.0).log()
    target = (level, inv_t, lse, one * 0, int32([9, 9]))
    tree = (torch.tensor([0, 9]), int32([0, 2]), int32([1, -1]), int32([-1, -1]))
    for backend in ("reference", "triton"):
        for delta, accepted in ((0.9, 1), (1.1, 0)):
            with use_backend(backend):
                found = typical_verify(
                    *tree, target, None, torch.tensor([4]), int32([1]), epsilon=0.5, delta=delta, max_depth=1
                )
            assert found[1].tolist() == [accepted], (backend, delta)


def test_on_a_gpu_a_path_ends_at_max_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    case = forest([60], 7)
    with use_backend("triton"):
        monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
        path, accepted, _ = typical_verify(**guarded_case(case | {"max_depth": 3}))
    with use_backend("reference"):
        whole = typical_verify(**case | {"max_depth": 60})[0]
    assert accepted.tolist() == [3] and path.tolist() == whole[:, :4].tolist()


def test_invalid_links_end_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU links are not checked: back, to the node itself, into other rows and out of the batch."""
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    for seed in range(5):
        case = forest([9, 0, 12, 4], 5, max_depth=4)
        g = torch.Generator().manual_seed(seed)
        for name in ("first_child", "next_sibling"):
            wild = torch.randint(-9, 34, (25,), generator=g)
            wild[torch.randint(0, 25, (2,), generator=g)] = 2**31 - 1
            case[name] = torch.where(torch.rand(25, generator=g) < 0.5, wild, case[name]).int()
        with use_backend("triton"):
            path, accepted, token = typical_verify(**guarded_case(case))
        for row, (start, stop) in enumerate(zip(case["offsets"][:-1], case["offsets"][1:], strict=True)):
            own = path[row, : int(accepted[row]) + 1]
            assert bool((own[1:] > own[:-1]).all()) and bool(((own >= start) & (own < stop)).all()) == (start < stop)
        assert token.tolist()[1] == -1 and bool((token < 5).all())


def test_errors_are_named() -> None:
    good = forest([3], 4)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"epsilon": -0.1}, "epsilon is -0.1; expected 0 or more"),
        ({"delta": float("nan")}, "delta is nan"),
        ({"max_depth": 0}, "max_depth"),
        ({"seeds": int32([1])}, "seeds.*torch.int64"),
        ({"target": dist(torch.zeros(2, 4))}, "target logits has 2 rows"),
        ({"tokens": torch.tensor([0, 4, 1])}, r"tokens\[1\] is 4"),
    ]
    with use_backend("triton"):
        typical_verify(**good | {"epsilon": 1, "delta": 0})
        for change, message in bad:
            with pytest.raises(ValueError, match=message):
                typical_verify(**good | change)
