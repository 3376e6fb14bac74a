"""Plain PyTorch definition of recursive_rejection_verify and recursive_rejection_thresholds."""

from __future__ import annotations

import torch
from torch import Tensor

from .._proposals.reference import DETERMINISTIC, Distribution, Tree, answer, coins, mass
from .._proposals.reference import check as check_proposals


def check(*args: object, max_depth: int | None = None) -> None:
    """Raises ValueError for arguments that recursive_rejection_verify (without max_depth:
    recursive_rejection_thresholds) cannot take.
    """
    op = "recursive_rejection_thresholds" if max_depth is None else "recursive_rejection_verify"
    check_proposals(op, *args, max_depth=max_depth)  # type: ignore[arg-type]


def _rounds(tree: Tree, node: int) -> tuple[list[float], Tensor]:
    """Accept thresholds of a node's children in order, and the weights left when all of them are refused."""
    rest, total = tree.target(node), 1.0
    thresholds = []
    for place, child in enumerate(tree.children[node]):
        token, dist = tree.token[child], tree.proposal(node, place)
        if dist is None:
            thresholds.append(0.0)  # not drawn from its distribution: no proposal, so nothing is subtracted either
            continue
        thresholds.append(min(1.0, float(rest[token]) / total / float(dist[token])))
        if tree.mark[child] == DETERMINISTIC:
            left, least = rest.clone(), 0.0
            left[token] = 0.0
        else:
            left, least = (rest * (1.0 / total) - dist).clamp(min=0.0), tree.dust
        # nothing left: the distribution was at most the proposal's up to rounding, so a refusal is rounding itself
        if mass(left) > least:
            rest, total = left, mass(left)
    return thresholds, rest


def recursive_rejection_verify(
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
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling over ordered proposals on a batch of trees: emitted tokens have exactly the target's
    distribution.

    At a node the children are tested in index order. The distribution r is the target's at first. Child x, drawn from
    distribution Q given what was decided before it, is accepted iff ``u < r(x) / Q(x)``, strictly; otherwise r
    becomes the normalised positive part of r - Q. An accepted child is the next node. When every child is refused,
    the next token is drawn from r, and at a leaf from the target's distribution, by the two-level race
    (``random.draw_from_weights``).

    Q is a point mass for a chosen token (r loses that token), the draft distribution for DRAWN (SpecInfer's
    siblings), the draft distribution without the tokens of earlier siblings drawn from the same row for
    SAMPLED_WITHOUT_EARLIER (recursive rejection, Sequoia, EAGLE-1), and the draft distribution without the tokens of
    chosen siblings for SAMPLED_WITHOUT_DETERMINISTIC (hybrid nodes). Any mixture within one node is exact, duplicates
    included. What an exclusion leaves is summed over what is left. A token that has no weight under its distribution
    was not drawn from it: it is refused and r stays as it is. Where less than 2**-20 (float64: 2**-44) of r is left
    after a drawn distribution, the refusal is rounding and r stays as it is.

    Args:
        tokens: int64 [M], packed nodes in target ids; the first node of a row is its root.
        offsets: int32 [B + 1].
        first_child: int32 [M], first child of each node, from tree_plan.
        next_sibling: int32 [M], next sibling of each node, from tree_plan.
        proposal_kinds: int8 [M], marks 0 to 3 in the order of ``proposals``; ignored at roots.
        dist_index: int32 [M], row of the draft distributions that a drawn node came from; ignored elsewhere.
        target: (logits [M, V], inv_t [M], lse [M], cut [M], tie_id [M]); row i is the distribution of the token after
            node i.
        draft: (logits [R, Vd], inv_t [R], lse [R], cut [R], tie_id [R]) or None if every node is chosen.
        token_ids: int64 [Vd], distinct target ids of the draft's columns, or None: column v is id v (Vd <= V).
        score_only: bool [M], nodes that are no proposals and never accepted, or None.
        seeds: int64 [B], request seeds.
        root_positions: int32 [B], absolute positions of the roots.
        uniforms: float32 [M] in (0, 1) instead of the keyed coins (those of roots are ignored).
        race: Gumbel noise (blocks [B, ceil(V / 1024)], tokens [B, V]), float32, instead of the keyed one.
        max_depth: capacity of a path, the root not counted.

    Returns:
        path: int32 [B, max_depth + 1], packed indices, root first, padded with -1.
        num_accepted: int32 [B], the root not counted.
        next_token: int64 [B]. A row without nodes has path -1, 0 and next_token -1; a row that stops at a
            distribution without any weight (lse = NaN, see distribution_stats) has next_token 0.

    Raises:
        ValueError: wrong shape, dtype, mark, id or distribution row, links that leave their row or do not point
            forward, or a tree deeper than max_depth.

    Sources: Miao et al., SpecInfer (2024), algorithm 2; Jeon et al., recursive speculative decoding (2024), section 3;
    Chen et al., Sequoia (2024), algorithm 2; Hu et al. (2025), section 4 (hybrid nodes).
    """
    check(tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only,
        seeds,
          root_positions, uniforms, race, max_depth=max_depth)  # fmt: skip
    tree = Tree(
        tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only
    )
    coin = coins(tree, seeds, root_positions, len(tokens)) if uniforms is None else uniforms.tolist()
    paths: list[list[int]] = []
    rest: list[Tensor] = []
    for start, end in zip(tree.bounds[:-1], tree.bounds[1:], strict=True):
        path: list[int] = []
        node = start if end > start else -1
        while node >= 0:
            path.append(node)
            thresholds, left = _rounds(tree, node)
            limits = torch.tensor(thresholds, dtype=tree.dtype).tolist()
            passed = [child for child, limit in zip(tree.children[node], limits, strict=True) if coin[child] < limit]
            if passed:
                node = passed[0]
                continue
            rest.append(left)
            node = -1
        paths.append(path)
    return answer(paths, rest, max_depth, seeds, root_positions, race)


def recursive_rejection_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    score_only: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What recursive_rejection_verify would do, without its randomness: for exact checks of its distribution, not for
    a decoding step.

    Args: as in recursive_rejection_verify.

    Returns:
        accept: [M], threshold of each node's coin, given that the walk is at its parent and has refused its earlier
        siblings: 1 at roots, 0 at score-only nodes, tail nodes and nodes without a parent.
        residual: [M, V], unnormalised weights of the token drawn if the walk ends at node i: all its children were
        refused, or it has none. Zero at tail nodes. Both float32, float64 if target or draft logits are.

    Raises:
        ValueError: as recursive_rejection_verify.
    """
    check(tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only)
    tree = Tree(
        tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only
    )
    accept = torch.zeros(len(tokens), dtype=tree.dtype)
    residual = torch.zeros(len(tokens), target[0].shape[1], dtype=tree.dtype, device=tokens.device)
    for start, end in zip(tree.bounds[:-1], tree.bounds[1:], strict=True):
        for node in range(start, end):
            if node == start:
                accept[node] = 1.0
            thresholds, residual[node] = _rounds(tree, node)
            accept[tree.children[node]] = torch.tensor(thresholds, dtype=tree.dtype)
    return accept.to(tokens.device), residual
