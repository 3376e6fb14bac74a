"""Plain PyTorch definition of rejection_verify, rejection_verify_logits and rejection_thresholds.

Tests: tests/kernels/test_rejection_verify.py, tests/rules/test_rejection.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...random import ACCEPT, RECOVER, sample_from_weights, uniform, words
from .._proposals.verify_arguments import Distribution, DraftChains, bind_chains
from ..distribution_stats.reference import distribution_stats, keep_rows, on_paths
from .checks import BLOCK_RULE, REJECTION, check
from .reference_thresholds import ChainNodes, block_rule, log_ratios, rejection_rule, residual_weights


def _thresholds(chains: DraftChains, rule: str) -> tuple[ChainNodes, Tensor, Tensor | None]:
    """Returns the nodes, the threshold of every node's uniform, and the reach of the block rule."""
    places, log_ratio = log_ratios(chains)
    if rule == REJECTION:
        return places, rejection_rule(log_ratio, places), None
    return places, *block_rule(chains, log_ratio, places)


def rejection_verify(
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
    *,
    max_depth: int,
    rule: str = REJECTION,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies draft chains by speculative sampling: emitted tokens have exactly the target's distribution.

    Shapes: M packed nodes of B rows, V target ids, R draft distributions of Vd columns.

    Rejection rule: node i of a row, the child of node i - 1, is accepted iff ``u < p(x) / q(x)``, strictly. Here p is
    the target distribution after node i - 1. The token was sampled from q; q(x) = 1 for a deterministic token. After
    the first rejection the next token is sampled from the positive part of p - q, or from p without x if x is
    deterministic. Without a rejection it is sampled from the distribution after the last node.

    Block rule: let w = 1 at the root and w = min(1, w' p(x) / q(x)) at its descendants, where w' belongs to the node
    before. The path ends at the last node with ``u < h``, whatever the earlier uniforms are. h = w at the last node of
    a row and at a node whose target distribution has no weight (lse = NaN). Elsewhere h = S / (S + 1 - w) (1 if w = 1).
    S is the total of the positive part of w p - q, where p is the target distribution after the node and q that of its
    child. The next token is sampled from this positive part. The block rule accepts at least as many tokens as the
    rejection rule. For chains of deterministic tokens, both numbers have the same distribution.

    A sampled token without weight under its distribution (log q < -87) was not sampled from it and is no proposal. Both
    rules reject it and treat the node before it as the last one of its row, so nothing is subtracted from p there.

    The next token is sampled by two-level Gumbel-max (``random.sample_from_weights``), which reads one row per request.

    Args:
        tokens: Packed nodes in target ids, int64 [M]; the first node of a row is its root.
        offsets: First node of each row, int32 [B + 1].
        proposal_kinds: DETERMINISTIC or SAMPLED, int8 [M]; all kinds but 0 mean SAMPLED. Ignored at roots.
        dist_index: Row of the draft distributions of each sampled node, int32 [M]; ignored elsewhere.
        target: (logits [M, V], inv_t [M], lse [M], cut [M], tie_id [M]). Row i is the distribution of the token after
            node i.
        draft: (logits [R, Vd], inv_t [R], lse [R], cut [R], tie_id [R]), or None if every node is deterministic.
        token_ids: Distinct target ids of the draft's columns, int64 [Vd], or None: column v is id v (Vd <= V).
        seeds: Request seeds, int64 [B].
        root_positions: Absolute positions of the roots, int32 [B].
        uniforms: Uniform draws in (0, 1) in place of keyed ones, float32 [M]; those of roots are ignored.
        gumbel_noise: Gumbel noise (blocks [B, ceil(V / 1024)], tokens [B, V]), float32, in place of keyed noise.
        max_depth: Capacity of a path, the root not counted.
        rule: "rejection" or "block".
        mass: Block masses of the target distributions, from distribution_stats(..., masses=True), or None. They save
            passes over the rows and never change the result, except that h of the block rule may differ by rounding.

    Returns:
        path: Packed indices, int32 [B, max_depth + 1], root first, padded with -1.
        num_accepted: int32 [B], the root not counted.
        next_token: int64 [B]. A row without nodes has path -1, 0 and next_token -1. A row that stops at a distribution
            without any weight (lse = NaN, see distribution_stats) has next_token 0.

    Raises:
        ValueError: If a shape, dtype, id or distribution row is wrong, or a row has more than max_depth draft tokens.

    Source:
        Leviathan, Kalman, Matias (2023), algorithm 1; Chen et al. (2023), algorithm 2; Sun et al. (2025, arXiv
        2403.10444), Block verification accelerates speculative decoding, algorithm 2.
    """
    chains, randomness = bind_chains(
        tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids, seeds, root_positions, uniforms,
        gumbel_noise,
    )  # fmt: skip
    check("rejection_verify", chains, randomness, max_depth=max_depth, rule=rule, mass=mass)
    nodes, batch, device = tokens.shape[0], offsets.shape[0] - 1, tokens.device
    places, threshold, reach = _thresholds(chains, rule)
    if uniforms is None and batch:
        of_row = places.row.clamp(min=0)
        uniforms = uniform(words(seeds[of_row], root_positions[of_row], places.place, ACCEPT, 0))
    start, count = offsets[:-1].long(), (offsets[1:] - offsets[:-1]).long()
    accepted = torch.zeros(batch, dtype=torch.int64, device=device)
    walking = count > 0
    for step in range(1, max_depth + 1):
        node = (start + step).clamp(max=max(nodes - 1, 0))
        if nodes == 0 or uniforms is None:
            break
        passed = (step < count) & (uniforms[node] < threshold[node])
        walking = walking & passed
        accepted = torch.where(passed if rule == BLOCK_RULE else walking, step, accepted)
    steps = torch.arange(max_depth + 1, device=device)
    path = torch.where((steps <= accepted[:, None]) & (count > 0)[:, None], start[:, None] + steps, -1)
    next_token = torch.full((batch,), -1, dtype=torch.int64, device=device)
    rows = (count > 0).nonzero().squeeze(1)
    if len(rows):
        weights = residual_weights((start + accepted)[rows], chains, places, reach)
        counter = (seeds[rows], root_positions[rows], accepted[rows])
        next_token[rows] = sample_from_weights(weights, *counter, RECOVER, randomness.noise_of(rows))
    return path.to(torch.int32), accepted.to(torch.int32), next_token


def rows_needing_stats(path: Tensor, num_accepted: Tensor, offsets: Tensor, nodes: int, rule: str) -> Tensor:
    """Returns the rows whose statistics a rule needs besides the acceptance tests, bool [nodes]."""
    ends = on_paths(path.gather(1, num_accepted[:, None].long()), nodes)
    return ends | ChainNodes.of(offsets, nodes).has_child if rule == BLOCK_RULE else ends


def rejection_verify_logits(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    draft: Distribution | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
    rule: str = REJECTION,
) -> tuple[Tensor, ...]:
    """Runs distribution_stats and rejection_verify in one operator.

    The rejection rule reads the logits of a path's nodes and of no others.

    Args:
        tokens: As in rejection_verify, like all arguments but logits and sampling. int64 [M].
        offsets: int32 [B + 1].
        proposal_kinds: int8 [M].
        dist_index: int32 [M].
        logits: [M, V]; row i belongs to the token after node i.
        sampling: (temperature, top_k, top_p, min_p), each [M], as distribution_stats takes them.
        draft: Distributions of R rows, or None.
        token_ids: int64 [Vd], or None.
        seeds: int64 [B].
        root_positions: int32 [B].
        max_depth: Capacity of a path, the root not counted.
        rule: "rejection" or "block".

    Returns:
        path: As rejection_verify.
        num_accepted: As rejection_verify.
        next_token: As rejection_verify.
        inv_t, lse, cut, tie_id, mass: As distribution_stats(..., masses=True) for the node at which each path ends, and
            by the block rule for all nodes with a child. Other rows are cleared: inv_t, cut and tie_id 0, lse +inf,
            mass NaN. Nodes without a child may be cleared too, as their next token needs no residual. A row without a
            distribution (lse NaN) is always reported.

    Raises:
        ValueError: As distribution_stats and rejection_verify.
    """
    inv_t, lse, cut, tie_id, mass = stats = distribution_stats(logits, *sampling, masses=True)
    verified = rejection_verify(
        tokens, offsets, proposal_kinds, dist_index, (logits, inv_t, lse, cut, tie_id), draft, token_ids, seeds,
        root_positions, max_depth=max_depth, rule=rule, mass=mass,
    )  # fmt: skip
    path, num_accepted, _ = verified
    return (*verified, *keep_rows(rows_needing_stats(path, num_accepted, offsets, len(tokens), rule), stats))


def rejection_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    *,
    rule: str = REJECTION,
) -> tuple[Tensor, Tensor]:
    """Returns the thresholds and residuals of rejection_verify, for exact checks of its distribution.

    It needs no randomness and is not for a decoding step.

    Args:
        tokens: As in rejection_verify, like all arguments. int64 [M].
        offsets: int32 [B + 1].
        proposal_kinds: int8 [M].
        dist_index: int32 [M].
        target: Distributions of M rows.
        draft: Distributions of R rows, or None.
        token_ids: int64 [Vd], or None.
        rule: "rejection" or "block".

    Returns:
        accept: [M], threshold of each node's uniform draw (1 at roots, 0 at tail nodes).
        residual: [M, V], unnormalised weights of the token sampled if the path ends at node i. Zero at tail nodes. Both
            float32, or float64 if target or draft logits are.

    Raises:
        ValueError: As rejection_verify.
    """
    chains = DraftChains(tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids)
    check("rejection_thresholds", chains, rule=rule)
    places, accept, reach = _thresholds(chains, rule)
    residual = residual_weights(torch.arange(len(tokens), device=tokens.device), chains, places, reach)
    residual[places.row < 0] = 0.0
    return accept.to(residual.dtype), residual
