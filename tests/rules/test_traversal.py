"""Rule traversal in exact arithmetic: every proposal distribution, every small tree, thresholds and residuals cell
by cell.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from oracles.tree_cases import CASES, SMALL, Case, accepted, check_cells, check_dist, check_oracle, check_walk, ids
from oracles.tree_drafts import packed
from oracles.tree_rules import DETERMINISTIC, SAMPLED, WITHOUT_CHOSEN, WITHOUT_EARLIER, block, ordered, traversal

from specdec_fast.interfaces import Needs, Rng
from specdec_fast.rules import get_rule
from specdec_kernels import tree_plan, use_backend
from specdec_kernels.dispatch import extension

RULE = get_rule("traversal")
BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_rational_rule_is_lossless(case: Case) -> None:
    check_oracle(case, traversal)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_thresholds_and_residuals_are_the_rational_ones_and_emit_the_target_s_distribution(
    case: Case, backend: str
) -> None:
    with use_backend(backend):
        check_cells(case, RULE, traversal)
        check_dist(case, RULE, "post")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_the_path_follows_the_uniforms(case: Case, backend: str) -> None:
    with use_backend(backend):
        check_walk(case, RULE, "post")


CHAINS = [Case(3, tuple(range(size)), (SAMPLED,) * size, 100 * size + seed) for size in (1, 2, 3) for seed in range(4)]
CHAINS += [Case(4, (0, 1), (SAMPLED, SAMPLED), 91), Case(3, (0, 1, 2), (SAMPLED, DETERMINISTIC, SAMPLED), 92)]


@pytest.mark.parametrize("case", CHAINS, ids=ids)
def test_on_chains_it_is_block_verification(case: Case) -> None:
    """Outcome by outcome, for every drafted chain: not only on average."""
    for _, tree in case.trees():
        size = len(tree.nodes) - 1
        p = [tree.p_after(tree.text(at)) for at in range(size + 1)]
        q = [tree.dist_of(at) for at in range(1, size + 1)]
        want = block(tree.text(size), p, q)  # type: ignore[arg-type]
        got = traversal(tree).emitted
        assert {text: chance for text, chance in got.items() if chance} == want


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_it_accepts_at_least_as_much_as_rule_tree(case: Case) -> None:
    assert accepted(case, traversal) >= accepted(case, ordered)


def test_hybrid_nodes_accept_what_theory_says() -> None:
    """A hybrid node accepts p(0) + sum min(p, q') if the sampled token comes before the deterministic token 0.

    This is optimal for hybrid drafts (Hu et al. 2025). The other order accepts less.
    """
    gaps = []
    for seed in range(30):
        first = Case(4, (0, 0), (WITHOUT_CHOSEN, DETERMINISTIC), seed)
        (_, tree), *_ = first.trees()
        p, q = list(tree.p_after(())), list(tree.q_after[tree.nodes[1].source](()))
        token = tree.nodes[2].token
        q[token] = Fraction(0)
        if not sum(q):
            continue
        best = p[token] + sum(min(a, b / sum(q)) for at, (a, b) in enumerate(zip(p, q, strict=True)) if at != token)
        assert accepted(first, traversal) == accepted(first, ordered) == best
        gaps.append(best)
    assert len(gaps) > 20


def test_a_drafter_may_mix_everything_and_beats_nothing_but_the_distribution() -> None:
    """The order of siblings changes how much is accepted, never the distribution."""
    sampled_first = Case(4, (0, 0, 0), (WITHOUT_CHOSEN, DETERMINISTIC, DETERMINISTIC), 3)
    sampled_last = Case(4, (0, 0, 0), (DETERMINISTIC, DETERMINISTIC, WITHOUT_CHOSEN), 3)
    for case in (sampled_first, sampled_last, Case(4, (0, 0, 0), (WITHOUT_EARLIER, DETERMINISTIC, WITHOUT_EARLIER), 3)):
        check_oracle(case, traversal)
        check_dist(case, RULE, "post")


def test_every_drafter_is_taken_and_dropped_tokens_are_not() -> None:
    assert RULE.why_not(Needs(topology="tree", dists=True)) is None and RULE.why_not(Needs()) is None
    case = Case(3, (0, 0), (SAMPLED, DETERMINISTIC), 5, score_only=(1,))
    draft, dists = packed([tree for _, tree in case.trees()])
    rng = Rng(torch.zeros(draft.num_rows, dtype=torch.int64), torch.zeros(draft.num_rows, dtype=torch.int32))
    with pytest.raises(ValueError, match="rule traversal: got node 1, a sampled token that is a score-only node"):
        RULE(draft, tree_plan(draft.parents, draft.offsets), dists, rng)
