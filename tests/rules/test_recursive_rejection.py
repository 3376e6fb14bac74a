"""Rule tree in exact arithmetic: every proposal distribution, every small tree, thresholds and residuals cell by
cell.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from oracles.tree_cases import CASES, SMALL, Case, OverColumns, check_cells, check_dist, check_oracle, check_walk, ids
from oracles.tree_drafts import packed
from oracles.tree_rules import DETERMINISTIC, SAMPLED, WITHOUT_CHOSEN, WITHOUT_EARLIER, DraftedTree, Node, ordered

from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Needs, Rng
from specdec_fast.rules import get_rule
from specdec_kernels import recursive_rejection_thresholds, tree_plan, use_backend
from specdec_kernels.dispatch import extension

RULE = get_rule("recursive_rejection")
BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_rational_rule_is_lossless(case: Case) -> None:
    check_oracle(case, ordered)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_thresholds_and_residuals_are_the_rational_ones_and_emit_the_target_s_distribution(
    case: Case, backend: str
) -> None:
    with use_backend(backend):
        check_cells(case, RULE, ordered)
        check_dist(case, RULE, "ordered")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_the_path_follows_the_uniforms(case: Case, backend: str) -> None:
    with use_backend(backend):
        check_walk(case, RULE, "ordered")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rule", "order"), [("rejection", "ordered"), ("recursive_rejection", "ordered"), ("traversal", "post")]
)
def test_a_draft_s_own_vocabulary_changes_no_distribution(rule: str, order: str, backend: str) -> None:
    """EAGLE-3 heads: their distributions are over some ids of the target's, in an order of their own."""
    with use_backend(backend):
        for case in SMALL:
            if rule != "rejection" or case.parents in ((0,), (0, 1)):
                check_dist(case, OverColumns(get_rule(rule)), order)  # type: ignore[arg-type]


def one_node(p: list[float], nodes: list[tuple[int, int]], q: list[float]) -> tuple[list[float], list[float]]:
    """Thresholds and normalised rest of one node whose children are (mark, token), all with the same draft
    distribution.
    """
    row = DraftedTree(
        (Node(-1, DETERMINISTIC, token=0), *(Node(0, mark, token=token) for mark, token in nodes)),
        lambda text: [Fraction(w) for w in p],
        [lambda text: [Fraction(w) for w in q]],
    )
    draft, dists = packed([row])
    threshold, residual = RULE.thresholds(draft, tree_plan(draft.parents, draft.offsets), dists)
    return threshold[1:].tolist(), (residual[0] / residual[0].sum()).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_siblings_are_tested_against_the_distribution_they_were_sampled_from(backend: str) -> None:
    """Numbers by hand: p = (1/2, 1/4, 1/4), q = (3/4, 1/8, 1/8), first child 0, second child 1."""
    p, q = [0.5, 0.25, 0.25], [0.75, 0.125, 0.125]
    with use_backend(backend):
        # r becomes (0, 1/2, 1/2) after the first; the second's distribution is q, or q without token 0: (0, 1/2, 1/2)
        threshold, rest = one_node(p, [(SAMPLED, 0), (SAMPLED, 1)], q)
        assert threshold == pytest.approx([2 / 3, 1.0]) and rest == pytest.approx([0, 0.5, 0.5])
        threshold, rest = one_node(p, [(SAMPLED, 0), (WITHOUT_EARLIER, 1)], q)
        assert threshold == pytest.approx([2 / 3, 1.0])
        threshold, _ = one_node([0.5, 0.1, 0.4], [(SAMPLED, 0), (WITHOUT_EARLIER, 1)], q)
        # r = (0, 0, 1) after the first: token 1 has nothing left
        assert threshold == pytest.approx([2 / 3, 0.0])
        # hybrid: token 2 was sampled outside of {0}, whose distribution is (0, 1/2, 1/2); then the deterministic 0
        threshold, rest = one_node(p, [(WITHOUT_CHOSEN, 2), (DETERMINISTIC, 0)], q)
        assert threshold == pytest.approx([0.5, 1.0]) and rest == pytest.approx([1, 0, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_were_not_sampled_from_their_distribution_change_nothing(backend: str) -> None:
    p, q = [0.5, 0.25, 0.25], [0.5, 0.5, 0.0]
    with use_backend(backend):
        # a token that q cannot give, a repeat of an earlier sibling, a deterministic sibling's token
        for nodes in ([(SAMPLED, 2)], [(WITHOUT_CHOSEN, 1), (DETERMINISTIC, 1)]):
            threshold, rest = one_node(p, nodes, q)
            assert threshold[0] == 0
            want = p if len(nodes) == 1 else [2 / 3, 0, 1 / 3]
            assert rest == pytest.approx(want)
        threshold, rest = one_node(p, [(SAMPLED, 1), (WITHOUT_EARLIER, 1)], q)
        assert threshold == pytest.approx([0.5, 0]) and rest == pytest.approx([0, 0, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_distributions_leave_nothing_to_draw_from(backend: str) -> None:
    """p = q up to rounding: a refusal is rounding, so what follows is p itself and not what rounding left."""
    vocab = 50
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    draft = Draft.trees([0], [([0, 7, 9], [-1, 0, 0])])
    plan = tree_plan(draft.parents, draft.offsets)
    p, q = logits.expand(3, vocab), (logits + 1e-7)[None]
    lse = p.double().logsumexp(1).float()
    stats = (torch.ones(3), lse, torch.full((3,), -float("inf")), torch.full((3,), vocab - 1, dtype=torch.int32))
    other = tuple(part[:1] for part in stats)
    with use_backend(backend):
        accept, rest = recursive_rejection_thresholds(
            draft.tokens, draft.offsets, plan.first_child, plan.next_sibling, torch.ones(3, dtype=torch.int8),
            torch.zeros(3, dtype=torch.int32), (p, *stats), (q, *other), None,
        )  # fmt: skip
    assert accept[1:].tolist() == pytest.approx([1, 1], abs=1e-5)
    torch.testing.assert_close(rest[0] / rest[0].sum(), p[0].softmax(0), rtol=1e-5, atol=1e-7)


def test_every_drafter_is_taken_and_dropped_tokens_are_not() -> None:
    assert RULE.why_not(Needs(topology="tree", dists=True)) is None and RULE.why_not(Needs()) is None
    case = Case(3, (0, 0), (SAMPLED, DETERMINISTIC), 5, score_only=(1,))
    draft, dists = packed([tree for _, tree in case.trees()])
    rng = Rng(torch.zeros(draft.num_rows, dtype=torch.int64), torch.zeros(draft.num_rows, dtype=torch.int32))
    with pytest.raises(
        ValueError, match="rule recursive_rejection: got node 1, a sampled token that is a score-only node"
    ):
        RULE(draft, tree_plan(draft.parents, draft.offsets), dists, rng)


def test_on_chains_it_is_rule_token() -> None:
    case = Case(3, (0, 1, 2), (SAMPLED, DETERMINISTIC, SAMPLED), 11)
    draft, dists = packed([tree for _, tree in case.trees()])
    assert draft.is_chain
    plan = tree_plan(draft.parents, draft.offsets)
    rng = Rng(torch.arange(draft.num_rows), torch.arange(draft.num_rows, dtype=torch.int32))
    ours, theirs = RULE(draft, plan, dists, rng), get_rule("rejection")(draft, plan, dists, rng)
    assert torch.equal(ours.path, theirs.path) and torch.equal(ours.next_token, theirs.next_token)
