"""Expected accepted tokens of a draft under a rule, from the distributions of draft and target.

The expectations are exact for the draft at hand, so means over drafts contain no noise of uniforms. All arithmetic is
dense: it serves choices and explanations, not decoding steps. Tests: tests/adaptive/test_exact_acceptance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.interfaces import Rule, has_thresholds
from specdec_kernels import tree_plan


class _DenseDraft:
    """A draft on the host: children of every node, the target's weights after it, and draft distributions."""

    def __init__(self, draft: Draft, target_dists: TokenDistributions) -> None:
        self.tokens, self.proposal_kinds = draft.tokens.tolist(), draft.proposal_kinds.tolist()
        self.starts = [start for start, size in zip(draft.offsets.tolist(), draft.counts) if size]
        rows, parents, dist_index = draft.row_of.tolist(), draft.parents.tolist(), draft.dist_index.tolist()
        offsets = draft.offsets.tolist()
        score_only = [False] * len(parents) if draft.score_only is None else draft.score_only.tolist()
        self.children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents):
            if parent >= 0 and not score_only[node]:
                self.children[offsets[rows[node]] + parent].append(node)
        self.counts = draft.counts
        self.p = target_dists.probs().double()
        self._q = None if draft.dists is None else draft.dists.probs().double()
        self._ids = None if draft.dists is None else draft.dists.token_ids
        self._dist_row = dist_index

    def draft_dist(self, node: int) -> Tensor | None:
        """The distribution of the first sampled child of a node, [V]; None if all children are deterministic."""
        rows = [
            self._dist_row[child]
            for child in self.children[node]
            if self.proposal_kinds[child] != ProposalKind.DETERMINISTIC
        ]
        if not rows or self._q is None:
            return None
        q = self._q[rows[0]]
        dist = torch.zeros_like(self.p[node])
        dist[torch.arange(len(q)) if self._ids is None else self._ids.to(dist.device)] = q
        return dist

    def expected_depth(self, probabilities: Callable[[int, list[int]], Sequence[float]]) -> Tensor:
        """Expected depth per row, given the probabilities of moving from a node to its children."""

        def below(node: int) -> float:
            children = self.children[node]
            return sum(
                share * (1 + below(child)) for child, share in zip(children, probabilities(node, children), strict=True)
            )

        starts = iter(self.starts)
        return torch.tensor([below(next(starts)) if size else 0.0 for size in self.counts], dtype=torch.float64)


def expected_accepted(rule: Rule, draft: Draft, target_dists: TokenDistributions) -> Tensor:
    """Computes the expected accepted tokens over all uniforms of a rule, or over the noise of a rule that replays.

    For a rule that replays, deterministic tokens are independent of the noise. A sampled token represents a token that
    the drafter picks from the same distribution by the target's own noise: coupled tokens have that distribution. Such
    a token x is also the target's choice with probability 1 / sum_y max(q_x p_y / p_x, q_y).

    Args:
        rule: The rule.
        draft: Packed trees of M nodes.
        target_dists: The target's distribution after each node, M rows.

    Returns:
        Expected accepted tokens, float64 [B].

    Raises:
        ValueError: If the rule neither replays nor has thresholds, or for coupled siblings, which have no closed form.

    Source:
        Daliri, Musco, Suresh 2024, for coupled tokens.
    """
    tree = _DenseDraft(draft, target_dists)
    if rule.replays:
        return tree.expected_depth(lambda node, children: _match_probabilities(tree, node, children))
    if not has_thresholds(rule):
        raise ValueError(f"rule {rule.name}: got a rule without `thresholds`; expected one with thresholds")
    plan = tree_plan(draft.parents, draft.offsets)
    limit = rule.thresholds(draft, plan, target_dists)[0].tolist()
    if not rule.from_leaves:
        return tree.expected_depth(lambda node, children: _first_to_pass([limit[child] for child in children]))

    def descend(node: int, depth: int) -> tuple[float, float]:
        """Probability that no uniform below a node passes, and expected depth of the first that does, in post-order."""
        fails, found = 1.0, 0.0
        for child in tree.children[node]:
            nothing, deep = descend(child, depth + 1)
            found += fails * (deep + nothing * limit[child] * (depth + 1))
            fails *= nothing * (1 - limit[child])
        return fails, found

    starts = iter(tree.starts)
    depths = [descend(next(starts), 0)[1] if size else 0.0 for size in tree.counts]
    return torch.tensor(depths, dtype=torch.float64)


def likeliest_accepted(draft: Draft, target_dists: TokenDistributions) -> Tensor:
    """Estimates the accepted tokens of a draft with the likeliest tokens of the same distributions.

    Every node has as many children as in the draft. Any lossless rule accepts each of them with the target's own
    probability. Distributions below the first level are taken from the draft, so beyond it this is an estimate.

    Args:
        draft: Packed trees of M nodes.
        target_dists: The target's distribution after each node, M rows.

    Returns:
        Expected accepted tokens, float64 [B].
    """
    tree = _DenseDraft(draft, target_dists)

    def probabilities(node: int, children: list[int]) -> Sequence[float]:
        q = tree.draft_dist(node)
        if q is None:
            return _match_probabilities(tree, node, children)
        found: list[float] = tree.p[node][torch.topk(q, len(children)).indices].tolist()
        return found

    return tree.expected_depth(probabilities)


def _first_to_pass(limits: Sequence[float]) -> list[float]:
    """Probability that each of several uniforms is the first to pass."""
    found, left = [], 1.0
    for limit in limits:
        found.append(left * limit)
        left *= 1 - limit
    return found


def _match_probabilities(tree: _DenseDraft, node: int, children: list[int]) -> list[float]:
    """Probability that the target's choice after a node is each of the children. Repeated tokens count once."""
    p = tree.p[node]
    if len(children) == 1 and tree.proposal_kinds[children[0]] != ProposalKind.DETERMINISTIC:
        q, token = tree.draft_dist(node), tree.tokens[children[0]]
        assert q is not None
        if not (p[token] > 0 and q[token] > 0):
            return [0.0]
        return [1.0 / float(torch.maximum(p * (q[token] / p[token]), q).sum())]
    if any(tree.proposal_kinds[child] != ProposalKind.DETERMINISTIC for child in children):
        raise ValueError("replay: got sampled siblings; expected deterministic ones, or one child per node")
    seen: set[int] = set()
    found = []
    for child in children:
        found.append(0.0 if tree.tokens[child] in seen else float(p[tree.tokens[child]]))
        seen.add(tree.tokens[child])
    return found
