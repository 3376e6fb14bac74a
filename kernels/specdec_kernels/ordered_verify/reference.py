"""Plain PyTorch definition of ordered_verify and ordered_thresholds."""

from __future__ import annotations

import torch
from torch import Tensor

from ..proposals import CHOSEN, Law, Tree, answer, coins, mass
from ..proposals import check as check_proposals


def check(*args: object, max_depth: int | None = None) -> None:
    """Raises ValueError for arguments that ordered_verify (without max_depth: ordered_thresholds) cannot take."""
    op = "ordered_thresholds" if max_depth is None else "ordered_verify"
    check_proposals(op, *args, max_depth=max_depth)  # type: ignore[arg-type]


def _rounds(tree: Tree, node: int) -> tuple[list[float], Tensor]:
    """Accept thresholds of a node's children in order, and the weights left when all of them are refused."""
    rest, total = tree.target(node), 1.0
    thresholds = []
    for place, child in enumerate(tree.children[node]):
        token, law = tree.token[child], tree.proposal(node, place)
        if law is None:
            thresholds.append(0.0)  # not drawn from its law: no proposal, so nothing is subtracted either
            continue
        thresholds.append(min(1.0, float(rest[token]) / total / float(law[token])))
        if tree.mark[child] == CHOSEN:
            left, least = rest.clone(), 0.0
            left[token] = 0.0
        else:
            left, least = (rest * (1.0 / total) - law).clamp(min=0.0), tree.dust
        # nothing left: the law was at most the proposal's up to rounding, so a refusal is rounding itself
        if mass(left) > least:
            rest, total = left, mass(left)
    return thresholds, rest


def ordered_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    scouts: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling over ordered proposals on a batch of trees: emitted tokens have exactly the target's law.

    At a node the children are tested in index order. The law r is the target's at first. Child x, drawn from law Q
    given what was decided before it, is accepted iff ``u < r(x) / Q(x)``, strictly; otherwise r becomes the
    normalised positive part of r - Q. An accepted child is the next node. When every child is refused, the next token
    is drawn from r, and at a leaf from the target's law, by the two-level race (``random.draw_from_weights``).

    Q is a point mass for a chosen token (r loses that token), the draft law for DRAWN (SpecInfer's siblings), the draft
    law without the tokens of earlier siblings drawn from the same row for DRAWN_WITHOUT_EARLIER (recursive rejection,
    Sequoia, EAGLE-1), and the draft law without the tokens of chosen siblings for DRAWN_WITHOUT_CHOSEN (hybrid nodes).
    Any mixture within one node is exact, duplicates included. What an exclusion leaves is summed over what is left. A
    token that has no weight under its law was not drawn from it: it is refused and r stays as it is. Where less than
    2**-20 (float64: 2**-44) of r is left after a drawn law, the refusal is rounding and r stays as it is.

    Args:
        tokens: int64 [M], packed nodes in target ids; the first node of a row is its root.
        offsets: int32 [B + 1].
        first_child, next_sibling: int32 [M], from tree_plan.
        drawn: int8 [M], marks 0 to 3 in the order of ``proposals``; ignored at roots.
        law_row: int32 [M], row of the draft laws that a drawn node came from; ignored elsewhere.
        target: (logits [M, V], inv_t [M], lse [M], cut [M], tie_id [M]); row i is the law of the token after node i.
        draft: (logits [R, Vd], inv_t [R], lse [R], cut [R], tie_id [R]) or None if every node is chosen.
        token_ids: int64 [Vd], distinct target ids of the draft's columns, or None: column v is id v (Vd <= V).
        scouts: bool [M], nodes that are no proposals and never accepted, or None.
        seeds: int64 [B], request seeds.
        root_positions: int32 [B], absolute positions of the roots.
        uniforms: float32 [M] in (0, 1) instead of the keyed coins (those of roots are ignored).
        race: Gumbel noise (blocks [B, ceil(V / 1024)], tokens [B, V]), float32, instead of the keyed one.
        max_depth: capacity of a path, the root not counted.

    Returns:
        path: int32 [B, max_depth + 1], packed indices, root first, padded with -1.
        num_accepted: int32 [B], the root not counted.
        next_token: int64 [B]. A row without nodes has path -1, 0 and next_token -1; a row that stops at a law without
        any weight (lse = NaN, see law_stats) has next_token 0.

    Raises:
        ValueError: wrong shape, dtype, mark, id or law row, links that leave their row or do not point forward, or a
            tree deeper than max_depth.

    Sources: Miao et al., SpecInfer (2024), algorithm 2; Jeon et al., recursive speculative decoding (2024), section 3;
    Chen et al., Sequoia (2024), algorithm 2; Hu et al. (2025), section 4 (hybrid nodes).
    """
    check(tokens, offsets, first_child, next_sibling, drawn, law_row, target, draft, token_ids, scouts, seeds,
          root_positions, uniforms, race, max_depth=max_depth)  # fmt: skip
    tree = Tree(tokens, offsets, first_child, next_sibling, drawn, law_row, target, draft, token_ids, scouts)
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


def ordered_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    scouts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What ordered_verify would do, without its randomness: for exact checks of its law, not for a decoding step.

    Args: as in ordered_verify.

    Returns:
        accept: [M], threshold of each node's coin, given that the walk is at its parent and has refused its earlier
        siblings: 1 at roots, 0 at scouts, tail nodes and nodes without a parent.
        residual: [M, V], unnormalised weights of the token drawn if the walk ends at node i: all its children were
        refused, or it has none. Zero at tail nodes. Both float32, float64 if target or draft logits are.

    Raises:
        ValueError: as ordered_verify.
    """
    check(tokens, offsets, first_child, next_sibling, drawn, law_row, target, draft, token_ids, scouts)
    tree = Tree(tokens, offsets, first_child, next_sibling, drawn, law_row, target, draft, token_ids, scouts)
    accept = torch.zeros(len(tokens), dtype=tree.dtype)
    residual = torch.zeros(len(tokens), target[0].shape[1], dtype=tree.dtype, device=tokens.device)
    for start, end in zip(tree.bounds[:-1], tree.bounds[1:], strict=True):
        for node in range(start, end):
            if node == start:
                accept[node] = 1.0
            thresholds, residual[node] = _rounds(tree, node)
            accept[tree.children[node]] = torch.tensor(thresholds, dtype=tree.dtype)
    return accept.to(tokens.device), residual
