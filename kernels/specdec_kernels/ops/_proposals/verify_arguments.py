"""Arguments of verify operators in bundles: distributions, draft chains, draft trees and randomness.

Public operators take flat arguments. Their backends bundle them with `bind_chains` or `bind_trees`, so the long
argument lists are written once. Operators without randomness make a `DraftChains` or `DraftTrees` themselves.

Tests: tests/kernels/test_rejection_verify.py, tests/kernels/test_recursive_rejection_verify.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

Distribution = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""(logits, inv_t, lse, cut, tie_id), as callers pass it."""
NO_DISTRIBUTION = (None, None, None, None, None)
NO_NOISE = (None, None)


class DistributionBatch(NamedTuple):
    """Rows of logits and their statistics, as `distribution_stats` returns them.

    Attributes:
        logits: [R, V] float32, bfloat16, float16 or float64, any row stride.
        inv_t: Inverse temperatures, [R]; 0 marks a greedy row.
        lse: Normalisers, [R].
        cut: Smallest logits that are kept, [R].
        tie_id: Largest ids that are kept at `cut`, int32 [R].
    """

    logits: Tensor
    inv_t: Tensor
    lse: Tensor
    cut: Tensor
    tie_id: Tensor


class DraftChains(NamedTuple):
    """A packed batch of draft chains and the distributions of both models.

    Attributes:
        tokens: int64 [M].
        offsets: int32 [B + 1].
        proposal_kinds: int8 [M].
        dist_index: int32 [M], row of `draft` of each sampled node.
        target: Target distributions, one row per node.
        draft: Draft distributions, or None.
        token_ids: int64 [Vd], token id of each column of `draft`, or None.
    """

    tokens: Tensor
    offsets: Tensor
    proposal_kinds: Tensor
    dist_index: Tensor
    target: Distribution
    draft: Distribution | None
    token_ids: Tensor | None

    def flat(self) -> tuple[Any, ...]:
        """Returns the arguments of the C++ operators, with distributions as separate tensors."""
        draft = self.draft or NO_DISTRIBUTION
        return (
            self.tokens, self.offsets, self.proposal_kinds, self.dist_index, *self.target, *draft, self.token_ids,
        )  # fmt: skip


class DraftTrees(NamedTuple):
    """A packed batch of draft trees and the distributions of both models.

    Attributes:
        tokens: int64 [M].
        offsets: int32 [B + 1].
        first_child: int32 [M].
        next_sibling: int32 [M].
        proposal_kinds: int8 [M], or None if the operator reads no proposals.
        dist_index: int32 [M], row of `draft` of each sampled node, or None as `proposal_kinds`.
        target: Target distributions, one row per node.
        draft: Draft distributions, or None.
        token_ids: int64 [Vd], token id of each column of `draft`, or None.
        score_only: bool [M], nodes that are never accepted, or None.
    """

    tokens: Tensor
    offsets: Tensor
    first_child: Tensor
    next_sibling: Tensor
    proposal_kinds: Tensor | None
    dist_index: Tensor | None
    target: Distribution
    draft: Distribution | None
    token_ids: Tensor | None
    score_only: Tensor | None = None

    def flat(self) -> tuple[Any, ...]:
        """Returns the arguments of the C++ operators, with distributions as separate tensors."""
        draft = self.draft or NO_DISTRIBUTION
        return (
            self.tokens, self.offsets, self.first_child, self.next_sibling, self.proposal_kinds, self.dist_index,
            *self.target, *draft, self.token_ids, self.score_only,
        )  # fmt: skip


class Randomness(NamedTuple):
    """Keys of the random draws of a verification, or the draws themselves.

    Attributes:
        seeds: Request seeds, int64 [B].
        root_positions: Absolute positions of the roots, int32 [B].
        uniforms: Uniform draws of the nodes, float32 [M], in place of keyed ones.
        gumbel_noise: Gumbel noise of (blocks [B, ceil(V / 1024)], tokens [B, V]), float32, in place of keyed noise.
    """

    seeds: Tensor
    root_positions: Tensor
    uniforms: Tensor | None
    gumbel_noise: tuple[Tensor, Tensor] | None

    def flat(self) -> tuple[Any, ...]:
        """Returns the arguments of the C++ operators, with noise as separate tensors."""
        return (self.seeds, self.root_positions, self.uniforms, *(self.gumbel_noise or NO_NOISE))

    def noise_of(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the given Gumbel noise of some rows (int64 [N]), or None."""
        return None if self.gumbel_noise is None else (self.gumbel_noise[0][rows], self.gumbel_noise[1][rows])


def bind_chains(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    gumbel_noise: tuple[Tensor, Tensor] | None = None,
) -> tuple[DraftChains, Randomness]:
    """Bundles the arguments of an operator on chains; checks nothing."""
    chains = DraftChains(tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids)
    return chains, Randomness(seeds, root_positions, uniforms, gumbel_noise)


def bind_trees(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    score_only: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    gumbel_noise: tuple[Tensor, Tensor] | None = None,
) -> tuple[DraftTrees, Randomness]:
    """Bundles the arguments of an operator on ordered proposals; checks nothing."""
    links = (tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index)
    trees = DraftTrees(*links, target, draft, token_ids, score_only)
    return trees, Randomness(seeds, root_positions, uniforms, gumbel_noise)
