"""recursive_rejection_verify and traversal_verify in Triton: the reference's results for every draw, thresholds and
residuals up to rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from oracles.interpreter import guarded_case
from oracles.proposal_cases import BAD, GOOD, dist, error_of, fixed, int32, proposals

from specdec_kernels import (
    distribution_stats,
    draft_sample,
    recursive_rejection_thresholds,
    recursive_rejection_verify,
    traversal_thresholds,
    traversal_verify,
    tree_plan,
    use_backend,
)
from specdec_kernels.dispatch import argument_checks

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]
RULES = {
    "ordered": (recursive_rejection_verify, recursive_rejection_thresholds),
    "traversal": (traversal_verify, traversal_thresholds),
}


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(proposals(HALF_AND_SINGLE))
def test_kernel_equals_reference(rule: str, case: dict[str, Any]) -> None:
    verify, thresholds = RULES[rule]
    with use_backend("reference"):
        want, (accept, residual) = verify(**case, max_depth=6), thresholds(**fixed(case))
    with use_backend("triton"):
        got = verify(**guarded_case(case), max_depth=6)
        got_accept, got_residual = thresholds(**guarded_case(fixed(case)))
    error = error_of(case)
    torch.testing.assert_close(got_accept, accept, rtol=64 * error, atol=16 * error)
    torch.testing.assert_close(got_residual, residual, rtol=64 * error, atol=16 * error)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def spine(rows: int, depth: int, vocab: int) -> dict[str, Any]:
    """Chains of sampled tokens. Every eighth level has two more children: one sampled without the first, one
    deterministic.
    """
    own, marks, levels, spine_of = [-1], [0], [0], [True]
    before, ends = 0, []
    for level in range(depth):
        parent = before
        ends.append(parent)
        before = len(own)
        for mark in (1, 2, 0) if level % 8 == 0 else (1,):
            spine_of.append(len(own) == before)
            own.append(parent)
            marks.append(mark)
            levels.append(level)
    size = len(own)
    parents, offsets = int32(own * rows), torch.arange(0, rows * size + 1, size, dtype=torch.int32)
    plan = tree_plan(parents, offsets)
    count = rows * size
    level = torch.randn(count, vocab)
    sources = (torch.arange(rows)[:, None] * size + torch.tensor(ends)).flatten()
    draft = dist((level[sources] + 0.1 * torch.randn(rows * depth, vocab)).bfloat16())
    order = torch.arange(count)
    dist_index = (torch.tensor(levels).repeat(rows) + order // size * depth).int()
    none = torch.zeros(count, dtype=torch.int32)
    uniforms = torch.rand(count)
    # uniforms that let the first row's path go far down
    uniforms[:size] = torch.where(torch.tensor(spine_of) & (torch.tensor(levels) < 50), 1e-6, uniforms[:size])
    return {
        "tokens": draft_sample(*(part[dist_index.long()] for part in draft), order, none, none),
        "offsets": offsets,
        "first_child": plan.first_child,
        "next_sibling": plan.next_sibling,
        "proposal_kinds": torch.tensor(marks * rows, dtype=torch.int8),
        "dist_index": dist_index,
        "target": (
            level,
            *distribution_stats(
                level, torch.where(order // size == 1, 0.0, 1.0), none, torch.ones(count), torch.zeros(count)
            ),
        ),
        "draft": draft,
        "token_ids": None,
        "score_only": None,
        "seeds": torch.arange(rows) * 13,
        "root_positions": int32([5] * rows),
        "uniforms": uniforms,
        "max_depth": depth,
    }


def parents_of(case: dict[str, Any]) -> torch.Tensor:
    """Parents of a single tree from its links."""
    parents = torch.full_like(case["first_child"], -1)
    for node, child in enumerate(case["first_child"].tolist()):
        while child >= 0:
            parents[child] = node
            child = int(case["next_sibling"][child])
    return parents


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("rows", "depth", "vocab"), [(1, 64, 7), (2, 2, 200_001)])
def test_deep_trees_and_a_large_vocabulary(rule: str, rows: int, depth: int, vocab: int) -> None:
    case = spine(rows, depth, vocab)
    with use_backend("reference"):
        want = RULES[rule][0](**case)
    with use_backend("triton"):
        got = RULES[rule][0](**case)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert depth < 64 or int(want[1].max()) >= 50


@pytest.mark.parametrize("rule", RULES)
def test_rows_without_a_distribution_and_duplicate_siblings(rule: str) -> None:
    """A node with a broken distribution accepts no child; two equal deterministic siblings share their probability."""
    level = torch.randn(7, 2000)
    level[1] = float("nan")
    tree_of = (
        torch.tensor([0, 0, 7, 0, 3, 3, 9]), int32([0, 0, 1, 3, 3, 7]), int32([-1, 2, -1, 4, -1, -1, -1]),
        int32([-1, -1, -1, -1, 5, 6, -1]), torch.zeros(7, dtype=torch.int8), int32([-1] * 7),
    )  # fmt: skip
    keys = (dist(level), None, None, None, torch.arange(5), torch.zeros(5, dtype=torch.int32))
    verify, thresholds = RULES[rule]
    with use_backend("reference"):
        want, limits = verify(*tree_of, *keys, max_depth=2), thresholds(*tree_of, *keys[:4])
    with use_backend("triton"):
        got, got_limits = verify(*tree_of, *keys, max_depth=2), thresholds(*tree_of, *keys[:4])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert got[2][2] == 0 and got_limits[0][5] == (0 if rule == "ordered" else limits[0][5])
    torch.testing.assert_close(got_limits[0], limits[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_invalid_links_end_a_path(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU links and distribution rows are not checked: links back, to the node itself, into other rows and out of
    the batch.
    """
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    offsets, nodes, vocab = int32([0, 9, 9, 21]), 25, 5
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        wild = {name: torch.randint(-9, 34, (nodes,), generator=g).int() for name in ("first_child", "next_sibling")}
        wild["dist_index"] = torch.randint(-99, 99, (nodes,), generator=g).int()
        for links in wild.values():
            links[torch.randint(0, nodes, (2,), generator=g)] = 2**31 - 1
            links[3], links[12] = 3, 12
        if seed == 0:  # two paths to node 2, and one of them comes after the end of the other
            wild["first_child"][:4], wild["next_sibling"][:4] = int32([1, 2, 3, -1]), int32([-1, 2, 1, 2])
        case = {
            "tokens": torch.randint(0, vocab, (nodes,), generator=g), "offsets": offsets, **wild,
            "proposal_kinds": torch.randint(0, 4, (nodes,), generator=g).to(torch.int8), "token_ids": None,
            "target": dist(torch.randn(nodes, vocab)), "draft": dist(torch.randn(3, vocab)),
            "score_only": torch.rand(nodes, generator=g) < 0.2 if seed % 2 else None, "seeds": torch.arange(3),
            "root_positions": int32([0, 0, 0]), "max_depth": 12,
        }  # fmt: skip
        with use_backend("triton"):
            path, accepted, token = RULES[rule][0](**guarded_case(case))
            limits, left = RULES[rule][1](**guarded_case(fixed(case)))
        for row, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            own = path[row, : int(accepted[row]) + 1]
            assert bool((own[1:] > own[:-1]).all()) and bool(((own >= start) & (own < stop)).all()) == (start < stop)
        assert token.tolist()[1] == -1 and bool((token < vocab).all())
        assert bool((limits >= 0).all() and (limits <= 1).all()) and not bool(left[21:].any() or limits[21:].any())


@pytest.mark.parametrize("rule", RULES)
def test_links_of_one_row_do_not_change_others(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of the first row lead into the second, whose result equals that of a batch without them."""
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    case = spine(2, 9, 7)
    verify = RULES[rule][0]
    with use_backend("triton"):
        want = verify(**guarded_case(case))
        size = int(case["offsets"][1])
        for name in ("first_child", "next_sibling"):
            own = (torch.arange(len(case[name])) < size) & (case[name] >= 0)
            case[name] = torch.where(own, case[name] + size, case[name]).int()
        got = verify(**guarded_case(case))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(got, want, strict=True)) and got[1][0] == 0


@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu_a_path_of_max_depth_ends_as_at_a_leaf(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree deeper than max_depth is an error where depths can be checked. Elsewhere deeper nodes are not tested, so
    they must not count as rejected: the result equals that of the tree without them.
    """
    case = spine(1, 4, 5) | {"max_depth": 2}
    verify = RULES[rule][0]
    depth = tree_plan(parents_of(case), case["offsets"]).depth
    shallow = case | {"first_child": torch.where(depth == 2, -1, case["first_child"]).int()}
    shallow["next_sibling"] = torch.where(depth > 2, -1, case["next_sibling"]).int()
    with use_backend("triton"):
        with pytest.raises(ValueError, match="larger max_depth"):
            verify(**case)
        monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
        for seed in range(4):
            keys = {"seeds": torch.tensor([seed])}
            got, want = verify(**guarded_case(case | keys)), verify(**guarded_case(shallow | keys))
            assert got[1].tolist() == [2]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_errors_are_named(rule: str) -> None:
    verify = RULES[rule][0]
    with use_backend("triton"):
        verify(**GOOD)
        for change, message in BAD:
            with pytest.raises(ValueError, match=message):
                verify(**(GOOD | change))
