"""rejection_verify and rejection_thresholds: extension against reference on ragged batches, edges of the rule,
errors.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from oracles.chain_cases import INF, check_logits, compare_thresholds, dist, fixed, int32, plain, verifications

from specdec_kernels import (
    distribution_stats,
    draft_sample,
    recursive_rejection_thresholds,
    rejection_thresholds,
    rejection_verify,
    rejection_verify_logits,
    traversal_thresholds,
    use_backend,
)
from specdec_kernels.dispatch import extension

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(verifications())
def test_extension_equals_reference(case: dict[str, Any]) -> None:
    sampling = case.pop("sampling")
    with use_backend("reference"):
        want = rejection_verify(**case, max_depth=6)
    with use_backend("cpu"):
        got = rejection_verify(**case, max_depth=6)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    with use_backend("reference"):
        limits = rejection_thresholds(**fixed(case))
    with use_backend("cpu"):
        compare_thresholds(case, rejection_thresholds(**fixed(case)), limits)
    check_logits(case, sampling, ("reference", "cpu"))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("rows", [1, 9])
def test_threads_do_not_change_results_and_stats(rows: int, rule: str) -> None:
    """One chain whose rows of logits threads share, with fewer or more threads than nodes, and with look-ahead beyond
    its end; and one chain per thread.
    """
    torch.manual_seed(3)
    count, vocab = rows * 4, 140_000 if rows == 9 else 35_000
    level = torch.randn(count, vocab) * 2
    draft = dist(level + 0.7 * torch.randn(count, vocab))
    order = torch.arange(count)
    offsets, kinds = torch.arange(0, count + 1, 4, dtype=torch.int32), torch.ones(count, dtype=torch.int8)
    dist_index = (order - 1).clamp(min=0).int()
    before, found, ends = torch.get_num_threads(), [], set()
    for seed in range(1 if rows == 9 else 12):
        tokens = draft_sample(*draft, order + 50 * seed, order.int(), order.int()).roll(1)
        for threads in (1, 2, 4, 7):
            torch.set_num_threads(threads)
            with use_backend("cpu"):
                chain = (tokens, offsets, kinds, dist_index, level, plain(count), draft, None, order[:rows] + seed)
                found.append(rejection_verify_logits(*chain, int32([5] * rows), max_depth=3, rule=rule))
        torch.set_num_threads(before)
        one, *others = found[-4:]
        for two in others:
            assert all(torch.equal(a, b) for a, b in zip(one[:3], two[:3], strict=True))
            both = torch.isfinite(one[4]) & torch.isfinite(two[4])
            assert both.sum() >= (one[1] < 3).sum(), "distributions of refusals"
            torch.testing.assert_close(one[4][both], two[4][both], rtol=1e-6, atol=0)
        ends |= set(one[1].tolist())
    assert len(ends) >= 3, "of several lengths"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_test_is_strict(backend: str) -> None:
    """A uniform equal to the threshold rejects, so a token of probability zero is never accepted."""
    target = dist(torch.tensor([[0.0, -INF], [0.0, 0.0]]))
    chain = (torch.tensor([0, 1]), int32([0, 2]), torch.zeros(2, dtype=torch.int8), int32([-1, -1]), target, None, None)
    with use_backend(backend):
        accept, residual = rejection_thresholds(*chain)
        assert accept.tolist() == [pytest.approx(1, rel=2e-7), 0] and residual[0].tolist() == [
            pytest.approx(1, rel=2e-7),
            0,
        ]
        _, accepted, token = rejection_verify(*chain, torch.tensor([1]), int32([3]), torch.zeros(2), max_depth=1)
        assert accepted.tolist() == [0] and token.tolist() == [0]
        half = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
        chain = (*chain[:4], dist(half), None, None)
        threshold = rejection_thresholds(*chain)[0][1]
        for uniform, want in ((threshold, 0), (torch.nextafter(threshold, torch.zeros(())), 1)):
            uniforms = torch.stack([torch.zeros(()), uniform])
            assert rejection_verify(*chain, torch.tensor([1]), int32([3]), uniforms, max_depth=1)[1].tolist() == [want]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_distributions_are_always_accepted_with_empty_residuals(backend: str) -> None:
    rows, vocab = 50, 2000
    level = torch.randn(rows, vocab) * 3
    offsets = int32(list(range(0, rows + 1, 2)))
    seeds, zero = torch.arange(rows // 2), torch.zeros(rows // 2, dtype=torch.int32)
    target = dist(level)
    roots = tuple(part[::2].contiguous() for part in target)
    tokens = torch.zeros(rows, dtype=torch.int64)
    tokens[1::2] = draft_sample(*roots, seeds, zero, zero)
    row = torch.arange(rows, dtype=torch.int32) // 2
    kinds = torch.ones(rows, dtype=torch.int8)
    with use_backend(backend):
        accept, residual = rejection_thresholds(tokens, offsets, kinds, row, target, roots, None)
        assert (accept == 1).all()
        assert (residual.sum(1) > 0.999).all()  # p itself where p - q is empty
        out = rejection_verify(tokens, offsets, kinds, row, target, roots, None, seeds, zero, max_depth=1)
    assert (out[1] == 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_the_draft_could_not_sample_is_rejected(backend: str) -> None:
    target = dist(torch.zeros(2, 4))
    chain = (torch.tensor([0, 3]), int32([0, 2]), torch.ones(2, dtype=torch.int8), int32([0, 0]), target)
    draft = dist(torch.zeros(1, 2))
    with use_backend(backend):
        for token_ids, rule in itertools.product((None, torch.tensor([0, 1])), ("rejection", "block")):
            accept, residual = rejection_thresholds(*chain, draft, token_ids, rule=rule)
            assert accept.tolist() == [1, 0]
            torch.testing.assert_close(residual, torch.full((2, 4), 0.25))  # nothing is subtracted
        accept, residual = rejection_thresholds(*chain, draft, torch.tensor([3, 0]))
        assert accept.tolist() == [1, 0.5]
        torch.testing.assert_close(residual[0], torch.tensor([0, 0.25, 0.25, 0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rule", "on_trees"), [("rejection", recursive_rejection_thresholds), ("block", traversal_thresholds)]
)
def test_a_falsely_sampled_token_is_no_proposal(backend: str, rule: str, on_trees: Any) -> None:
    """The row behaves as if it ended before that token, also for the next token. Rules on trees do the same."""
    target, draft = dist(torch.randn(4, 5)), torch.randn(3, 5)
    draft[1, 3] = -INF
    tokens, marks, sources = (
        torch.tensor([0, 2, 3, 1]),
        torch.tensor([0, 1, 1, 1], dtype=torch.int8),
        int32([-1, 0, 1, 2]),
    )
    target[0][0, 2] = draft[0, 2] - 1.0  # p(2) < q(2): rule `block` reaches the next node with some probability
    target = dist(target[0])
    dists = (target, dist(draft), None)
    with use_backend(backend):
        accept, residual = rejection_thresholds(tokens, int32([0, 4]), marks, sources, *dists, rule=rule)
        ended = (part[:2].clone() for part in (tokens, marks, sources))
        short = next(ended), int32([0, 2]), *ended
        end = rejection_thresholds(*short, tuple(part[:2] for part in target), *dists[1:], rule=rule)
        assert 0 < accept[1] < 1 and accept[2] == 0 and torch.equal(accept[:2], end[0])
        torch.testing.assert_close(residual[:2], end[1])
        links = int32([1, 2, 3, -1]), int32([-1] * 4)
        want = on_trees(tokens, int32([0, 4]), *links, marks, sources, *dists)
        torch.testing.assert_close((accept, residual), want)
        seeds, roots = torch.arange(400), torch.zeros(400, dtype=torch.int32)
        fair, sure = dist(torch.zeros(800, 2)), dist(torch.tensor([[0.0, -INF]]))
        nodes = torch.tensor([0, 1]).repeat(400)
        order = torch.arange(0, 801, 2, dtype=torch.int32), (nodes > 0).to(torch.int8), nodes.int() * 0
        _, accepted, emitted = rejection_verify(nodes, *order, fair, sure, None, seeds, roots, max_depth=1, rule=rule)
    assert accepted.sum() == 0 and 150 < emitted.sum() < 250


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_rows_match_tokens(backend: str) -> None:
    level = torch.randn(4, 50)
    best = level.argmax(1)
    target = dist(level, 0.0)
    no_dist = (torch.zeros(4, dtype=torch.int8), int32([-1] * 4))
    for right in range(4):
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), best[:3]])
        if right < 3:
            tokens[right + 1] = (tokens[right + 1] + 1) % 50
        with use_backend(backend):
            path, accepted, token = rejection_verify(
                tokens, int32([0, 4]), *no_dist, target, None, None, torch.tensor([9]), int32([2]), max_depth=5
            )
        assert accepted.tolist() == [right] and token.tolist() == [int(best[right])]
        assert path.tolist() == [[*range(right + 1), *[-1] * (5 - right)]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_nodes_and_without_a_distribution(backend: str) -> None:
    level = torch.randn(2, 2000)
    level[1, 7] = float("nan")
    chain = (torch.tensor([0, 0]), int32([0, 0, 1, 2, 2]), torch.zeros(2, dtype=torch.int8), int32([-1, -1]))
    zero = torch.zeros(4, dtype=torch.int32)
    with use_backend(backend):
        path, accepted, token = rejection_verify(*chain, dist(level), None, None, torch.arange(4), zero, max_depth=2)
    assert path.tolist() == [[-1] * 3, [0, -1, -1], [1, -1, -1], [-1] * 3]
    assert accepted.tolist() == [0] * 4
    assert token.tolist()[0] == token.tolist()[3] == -1 and token[2] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_path_ends_before_an_empty_distribution(backend: str) -> None:
    """Rule `block`: a node without continuation is reached with the probability of a row's last node."""
    torch.manual_seed(4)
    level, draft = torch.randn(4, 40), dist(torch.randn(2, 40))
    level[1] = float("nan")
    target, sources = dist(level), int32([-1, 0, 1, 1])
    tokens, marks = torch.tensor([0, 3, 5, 6]), torch.tensor([0, 1, 1, 0], dtype=torch.int8)
    with use_backend(backend):
        broken, _ = rejection_thresholds(tokens, int32([0, 4]), marks, sources, target, draft, None, rule="block")
        short = tuple(part[:2] for part in (tokens, marks, sources))
        end, _ = rejection_thresholds(
            short[0], int32([0, 2]), *short[1:], tuple(part[:2] for part in target), draft, None, rule="block"
        )
    assert broken[:2].tolist() == end.tolist() and broken[2:].tolist() == [0, 0] and 0 < end[1] < 1


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("mapped", [False, True])
def test_masses_do_not_change_the_result(rule: str, mapped: bool) -> None:
    """Many blocks of very different mass, a removed token with nearly all mass of its block, any draft."""
    torch.manual_seed(1)
    rows, nodes, vocab = 12, 5, 9_000
    count = rows * nodes
    level = torch.randn(count, vocab) * 3
    level[::2, 5000] = 14.0
    draft_level = level + torch.randn(count, 1) * torch.randn(count, vocab)
    order = torch.arange(count)
    *target, mass = distribution_stats(level, *plain(count), masses=True)
    draft = dist(draft_level)
    kinds = (order % 3 > 0).to(torch.int8)
    tokens = torch.where(order % 3 > 0, draft_sample(*draft, order, order.int(), order.int()).roll(1), 5000)
    chain = (tokens, torch.arange(0, count + 1, nodes, dtype=torch.int32), kinds, (order - 1).clamp(min=0).int())
    ends = set()
    for seed in range(20):
        random = (torch.arange(rows) + 100 * seed, torch.arange(rows, dtype=torch.int32))
        more: dict[str, Any] = {"max_depth": nodes - 1, "rule": rule}
        token_ids = torch.arange(vocab) if mapped else None
        with use_backend("cpu"):
            want = rejection_verify(*chain, (level, *target), draft, token_ids, *random, **more)
            got = rejection_verify(*chain, (level, *target), draft, token_ids, *random, **more, mass=mass)
            useless = rejection_verify(
                *chain, (level, *target), draft, token_ids, *random, **more, mass=mass * float("nan")
            )
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, got, useless, strict=True))
        ends |= set(got[1].tolist())
    assert len(ends) >= 4


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("offset", [0.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masses", [True, False])
def test_uniforms_near_block_thresholds(dtype: torch.dtype, offset: float, masses: bool) -> None:
    """The residual is summed only as far as the uniform requires; the decision equals that of the whole sum."""
    torch.manual_seed(4)
    nodes, vocab, offset = 24, 5000, offset if dtype == torch.float32 else offset / 100
    level = torch.randn(nodes, vocab) * 2 + torch.linspace(-3, 3, vocab)  # later blocks weigh more
    near = level + torch.randn(nodes, vocab) * 0.7
    level[:, ::7] = near[:, 1::11] = -INF
    target, draft = dist((level + offset).to(dtype)), dist((near + offset).to(dtype))
    weighed = distribution_stats(target[0], *plain(nodes), masses=True)[4] if masses else None
    order = torch.arange(nodes, dtype=torch.int32)
    tokens = draft_sample(*draft, order.long(), order, order)
    chain: tuple[Any, ...] = (tokens.roll(1), torch.arange(0, nodes + 1, 3, dtype=torch.int32))
    chain += (torch.ones(nodes, dtype=torch.int8), (order - 1).clamp(min=0))
    case = (*chain, target, draft, None)
    with use_backend("reference"):
        limits = rejection_thresholds(*case, rule="block")[0]
    inner = [node for node in range(nodes) if node % 3 == 1 and 0 < limits[node] < 1]
    assert inner
    seeds, roots = torch.arange(nodes // 3), torch.arange(nodes // 3, dtype=torch.int32)
    for node in inner:
        for aside, accepted in ((1 - 1e-4, 1), (1 + 1e-4, 0)):
            uniforms = torch.ones(nodes)
            uniforms[node] = limits[node] * aside
            with use_backend("cpu"):
                found = rejection_verify(*case, seeds, roots, uniforms, max_depth=2, rule="block", mass=weighed)[1]
            assert found.tolist() == [accepted * (row == node // 3) for row in range(nodes // 3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rule_block_reads_beyond_a_uniform_that_fails(backend: str) -> None:
    target, draft = (
        dist(torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 0.0]])),
        dist(torch.tensor([[1.0, 0.0], [0.0, 0.0]])),
    )
    chain = (torch.tensor([0, 0, 0]), int32([0, 3]), torch.ones(3, dtype=torch.int8), int32([-1, 0, 1]))
    uniforms = torch.tensor([0.0, 0.99, 0.5])
    with use_backend(backend):
        for rule, want in (("rejection", 0), ("block", 2)):
            _, accepted, _ = rejection_verify(
                *chain, target, draft, None, torch.tensor([1]), int32([3]), uniforms, max_depth=2, rule=rule
            )
            assert accepted.tolist() == [want]
        accept = rejection_thresholds(*chain, target, draft, None, rule="block")[0]
    p, q = 0.5, float(torch.tensor([1.0, 0.0]).softmax(0)[0])
    reach, p_next = p / q, torch.tensor([3.0, 0.0]).softmax(0)
    left = float((reach * p_next - 0.5).clamp(min=0).sum())
    want_first = left / (left + 1 - reach)
    assert accept.tolist() == pytest.approx([1.0, want_first, min(1.0, reach * float(p_next[0]) / 0.5)], abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_named(backend: str) -> None:
    good: dict[str, Any] = {
        "tokens": torch.tensor([0, 1, 2]),
        "offsets": int32([0, 3]),
        "proposal_kinds": torch.tensor([0, 1, 0], dtype=torch.int8),
        "dist_index": int32([-1, 0, -1]),
        "target": dist(torch.zeros(3, 4)),
        "draft": dist(torch.zeros(1, 4)),
        "token_ids": None,
        "seeds": torch.tensor([1]),
        "root_positions": int32([5]),
        "max_depth": 2,
    }
    bad: list[tuple[dict[str, Any], str]] = [
        ({"tokens": torch.tensor([0, 4, 2])}, r"tokens\[1\] is 4.*\[0, 4\)"),
        ({"tokens": torch.tensor([0, -1, 2])}, r"tokens\[1\] is -1"),
        ({"dist_index": int32([-1, 1, -1])}, r"dist_index\[1\] is 1"),
        ({"draft": None}, r"proposal_kinds\[1\] is 1.*no draft distributions"),
        ({"max_depth": 1}, r"2 draft tokens.*larger max_depth"),
        ({"offsets": int32([0, 4])}, "offsets"),
        ({"target": dist(torch.zeros(2, 4))}, "target logits has 2 rows"),
        ({"target": torch.zeros(3, 4)}, "distribution_stats"),
        ({"draft": dist(torch.zeros(1, 5))}, "5 columns"),
        ({"token_ids": torch.tensor([0, 1, 2, 4])}, r"token_ids\[3\] is 4"),
        ({"seeds": int32([1])}, r"seeds.*torch.int64"),
        ({"uniforms": torch.zeros(2)}, r"uniforms.*shape"),
        ({"gumbel_noise": (torch.zeros(1, 1), torch.zeros(1, 3))}, r"gumbel_noise of tokens.*shape"),
        ({"proposal_kinds": torch.zeros(3)}, r"proposal_kinds.*torch.int8"),
        ({"rule": "recursive_rejection"}, r"rule is 'recursive_rejection'; expected 'rejection' or 'block'"),
        ({"mass": torch.zeros(3, 2)}, r"mass.*shape"),
        ({"mass": torch.zeros(3, 1, dtype=torch.float64)}, r"mass.*torch.float32"),
    ]
    with use_backend(backend):
        rejection_verify(**good)
        for change, message in bad:
            with pytest.raises(ValueError, match=message):
                rejection_verify(**(good | change))
