"""How many tokens of a draft a rule is expected to accept, from the distributions of draft and target, before a coin
is tossed.

Exact expectations for the draft at hand, so averages over drafts have no noise of coins in them. Everything is dense:
for choosing and explaining, not for a decoding step. Tests: tests/adaptive/test_expected_acceptance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.interfaces import Rule, has_thresholds
from specdec_kernels import tree_plan


class _Weighed:
    """A draft on the host: children of every node, the target's weights after it, the distribution of its drawn
    children.
    """

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
        """The distribution that the first drawn child of a node came from, [V]; None where all are chosen."""
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

    def total(self, chance: Callable[[int, list[int]], Sequence[float]]) -> Tensor:
        """Expected depth per row, if the walk goes from a node to its children with these chances."""

        def below(node: int) -> float:
            children = self.children[node]
            return sum(
                share * (1 + below(child)) for child, share in zip(children, chance(node, children), strict=True)
            )

        starts = iter(self.starts)
        return torch.tensor([below(next(starts)) if size else 0.0 for size in self.counts], dtype=torch.float64)


def expected_accepted(rule: Rule, draft: Draft, target_dists: TokenDistributions) -> Tensor:
    """Expected accepted tokens of every row, float64 [B], over all coins of a rule, or over replay's noise.

    For a rule that replays, chosen tokens know nothing of the noise, and a token that was drawn stands for one that the
    drafter chose from the same distribution by the target's own noise: coupled tokens have that distribution. Such a
    token x is also the target's choice with chance 1 / sum_y max(q_x p_y / p_x, q_y) (Daliri, Musco, Suresh 2024).

    Raises ValueError for a rule that shows neither, and for coupled siblings, of which there is no closed form.
    """
    tree = _Weighed(draft, target_dists)
    if rule.replays:
        return tree.total(lambda node, children: _matches(tree, node, children))
    if not has_thresholds(rule):
        raise ValueError(f"rule {rule.name}: got a rule without `thresholds`; expected one that shows its coins")
    plan = tree_plan(draft.parents, draft.offsets)
    limit = rule.thresholds(draft, plan, target_dists)[0].tolist()
    if not rule.from_leaves:
        return tree.total(lambda node, children: _in_order([limit[child] for child in children]))

    def first_to_pass(node: int, depth: int) -> tuple[float, float]:
        """Chance that no coin below a node passes, and the expected depth of the first that does, in post-order."""
        fails, found = 1.0, 0.0
        for child in tree.children[node]:
            nothing, deep = first_to_pass(child, depth + 1)
            found += fails * (deep + nothing * limit[child] * (depth + 1))
            fails *= nothing * (1 - limit[child])
        return fails, found

    starts = iter(tree.starts)
    depths = [first_to_pass(next(starts), 0)[1] if size else 0.0 for size in tree.counts]
    return torch.tensor(depths, dtype=torch.float64)


def likeliest_accepted(draft: Draft, target_dists: TokenDistributions) -> Tensor:
    """Expected accepted tokens, float64 [B], of a draft like this one whose tokens are the likeliest of the same
    distributions.

    At every node as many as it has children, each accepted by any lossless rule with the target's own probability. What
    follows them is taken to be what follows the tokens of the draft, so beyond the first level this is an estimate.
    """
    tree = _Weighed(draft, target_dists)

    def chance(node: int, children: list[int]) -> Sequence[float]:
        q = tree.draft_dist(node)
        if q is None:
            return _matches(tree, node, children)
        found: list[float] = tree.p[node][torch.topk(q, len(children)).indices].tolist()
        return found

    return tree.total(chance)


def _in_order(limits: Sequence[float]) -> list[float]:
    """Chance that each of some coins is the first to pass."""
    found, left = [], 1.0
    for limit in limits:
        found.append(left * limit)
        left *= 1 - limit
    return found


def _matches(tree: _Weighed, node: int, children: list[int]) -> list[float]:
    """Chance that the target's choice after a node is each of the children; a token that comes again adds nothing."""
    p = tree.p[node]
    if len(children) == 1 and tree.proposal_kinds[children[0]] != ProposalKind.DETERMINISTIC:
        q, token = tree.draft_dist(node), tree.tokens[children[0]]
        assert q is not None
        if not (p[token] > 0 and q[token] > 0):
            return [0.0]
        return [1.0 / float(torch.maximum(p * (q[token] / p[token]), q).sum())]
    if any(tree.proposal_kinds[child] != ProposalKind.DETERMINISTIC for child in children):
        raise ValueError("replay: got drawn siblings; expected chosen ones, or one child to every node")
    seen: set[int] = set()
    found = []
    for child in children:
        found.append(0.0 if tree.tokens[child] in seen else float(p[tree.tokens[child]]))
        seen.add(tree.tokens[child])
    return found
