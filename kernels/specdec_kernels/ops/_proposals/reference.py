"""Proposals on packed trees, for the references of the rules that use draft distributions.

The children of a node are an ordered list of proposals. Each has a distribution, given everything that was decided
before it: a point mass if its token is deterministic, else its draft distribution, restricted to the tokens that could
still be sampled. Score-only nodes are no proposals and are skipped wherever children are listed.

Tests: tests/rules/test_recursive_rejection.py, tests/kernels/test_recursive_rejection_verify.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...random import ACCEPT, RECOVER, sample_from_weights, uniform, words
from ..distribution_stats.reference import dist_probs
from .checks import DETERMINISTIC, SAMPLED_WITHOUT_DETERMINISTIC, SAMPLED_WITHOUT_EARLIER
from .verify_arguments import Distribution, DistributionBatch, DraftTrees, Randomness


def residual_epsilon(target: Distribution, draft: Distribution | None) -> float:
    """Mass of a residual after a sampled proposal that counts as rounding: a rejection there has no probability."""
    double = DistributionBatch(*target).inv_t.dtype == torch.float64
    double = double and (draft is None or DistributionBatch(*draft).inv_t.dtype == torch.float64)
    return 2.0**-44 if double else 2.0**-20


class DenseTrees:
    """A packed batch of draft trees on the host, its distributions as dense weights.

    Attributes:
        bounds: First node of each row, and the end.
        tokens: Token of each node.
        kinds: Proposal kind of each node.
        dist_rows: Draft distribution of each node.
        parents: Parent of each node, -1 for none.
        children: Proposals after each node, in order.
        p: Target weights, [M, V].
        q: Draft weights, [R, Vd], or None.
        dtype: dtype of all weights.
        residual_epsilon: See `residual_epsilon`.
    """

    def __init__(self, trees: DraftTrees) -> None:
        assert trees.proposal_kinds is not None and trees.dist_index is not None
        self.bounds: list[int] = trees.offsets.tolist()
        self.tokens: list[int] = trees.tokens.tolist()
        self.kinds: list[int] = trees.proposal_kinds.tolist()
        self.dist_rows: list[int] = trees.dist_index.tolist()
        self.dists, self.token_ids = DistributionBatch(*trees.target), trees.token_ids
        draft = None if trees.draft is None else DistributionBatch(*trees.draft)
        own = self.dists.inv_t.dtype
        self.dtype = own if draft is None else torch.promote_types(own, draft.inv_t.dtype)
        self.p = dist_probs(*self.dists).to(self.dtype)
        self.q = None if draft is None else dist_probs(*draft).to(self.dtype)
        self.residual_epsilon = residual_epsilon(trees.target, trees.draft)
        first, sibling = trees.first_child.tolist(), trees.next_sibling.tolist()
        score_only = [False] * len(first) if trees.score_only is None else trees.score_only.tolist()
        self.parents = [-1] * len(first)
        self.children: list[list[int]] = [[] for _ in first]
        for node in range(self.bounds[-1]):
            child = first[node]
            while child >= 0:
                if not score_only[child]:
                    self.children[node].append(child)
                    self.parents[child] = node
                child = sibling[child]

    def target(self, node: int) -> Tensor:
        """Weights of the target's distribution after a node: [V]."""
        return self.p[node]

    def has_no_distribution(self, node: int) -> bool:
        """Returns whether the target's distribution after a node has no weight."""
        return bool(self.dists.lse[node].isnan())

    def proposal(self, parent: int, place: int) -> Tensor | None:
        """Computes the distribution from which child number `place` was sampled, given earlier decisions.

        Args:
            parent: Packed index of the parent.
            place: Index of the child among its siblings.

        Returns:
            Weights [V]. None if the child's token has no weight: it was not sampled from this distribution, so it is
            no proposal.
        """
        siblings = self.children[parent]
        node = siblings[place]
        token, kind = self.tokens[node], self.kinds[node]
        weights = torch.zeros(self.p.shape[1], dtype=self.dtype, device=self.p.device)
        if kind == DETERMINISTIC:
            weights[token] = 1.0
            return weights
        assert self.q is not None
        row = self.dist_rows[node]
        q = self.q[row]
        if self.token_ids is None:
            weights[: len(q)] = q
        else:
            weights[self.token_ids] = q
        excluded: list[int] = []
        if kind == SAMPLED_WITHOUT_EARLIER:
            sampled = (other for other in siblings[:place] if self.kinds[other] != DETERMINISTIC)
            excluded = [self.tokens[other] for other in sampled if self.dist_rows[other] == row]
        elif kind == SAMPLED_WITHOUT_DETERMINISTIC:
            excluded = [self.tokens[other] for other in siblings if self.kinds[other] == DETERMINISTIC]
        weights[excluded] = 0.0
        if not float(weights[token]) > 0:
            return None
        return weights * (1.0 / total_mass(weights)) if excluded else weights

    def uniforms(self, randomness: Randomness) -> list[float]:
        """Returns the uniform of every node: the given one, or that keyed by the node's index within its row."""
        if randomness.uniforms is not None:
            given: list[float] = randomness.uniforms.tolist()
            return given
        seeds, nodes = randomness.seeds, len(self.tokens)
        bounds = torch.tensor(self.bounds, device=seeds.device)
        packed = torch.arange(nodes, device=seeds.device)
        row = (torch.searchsorted(bounds, packed, right=True) - 1).clamp(min=0, max=max(len(bounds) - 2, 0))
        if not len(seeds):
            return [1.0] * nodes
        keyed = words(seeds[row], randomness.root_positions[row], packed - bounds[row], ACCEPT, 0)
        found: list[float] = uniform(keyed).tolist()
        return found


def total_mass(weights: Tensor) -> float:
    """Total of weights [V], summed in float64."""
    return float(weights.sum(dtype=torch.float64))


def pack_result(
    paths: list[list[int]], residuals: list[Tensor], max_depth: int, randomness: Randomness
) -> tuple[Tensor, Tensor, Tensor]:
    """Packs one path per row into the results of a verify operator.

    Args:
        paths: Packed nodes of each path, root first; empty for a row without nodes.
        residuals: Weights [V] of the next token, for every row with a path, in order.
        max_depth: Capacity of a path without its root.
        randomness: Keys or noise of the next token.

    Returns:
        path, num_accepted and next_token.
    """
    seeds = randomness.seeds
    padded = [path + [-1] * (max_depth + 1 - len(path)) for path in paths]
    accepted = [max(len(path) - 1, 0) for path in paths]
    num_accepted = torch.tensor(accepted, dtype=torch.int32, device=seeds.device)
    next_token = torch.full((len(paths),), -1, dtype=torch.int64, device=seeds.device)
    if residuals:
        rows = torch.tensor([row for row, path in enumerate(paths) if path], device=seeds.device)
        counter = (seeds[rows], randomness.root_positions[rows], num_accepted[rows])
        next_token[rows] = sample_from_weights(torch.stack(residuals), *counter, RECOVER, randomness.noise_of(rows))
    path = torch.tensor(padded, dtype=torch.int32, device=seeds.device).reshape(len(paths), max_depth + 1)
    return path, num_accepted, next_token
