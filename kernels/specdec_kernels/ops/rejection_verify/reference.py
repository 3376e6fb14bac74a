"""Plain PyTorch definition of rejection_verify and rejection_thresholds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...random import ACCEPT, BLOCK, RECOVER, draw_from_weights, uniform, words
from ..distribution_stats.reference import LEAST_LOG_WEIGHT, dist_probs, distribution_stats, on_paths, only

DETERMINISTIC = 0
"""The proposal is a point mass (n-gram, retrieval, arg-max heads): q(x) = 1."""
SAMPLED = 1
"""The proposal was drawn from row ``dist_index`` of the draft distributions. On a chain all other non-zero marks
mean the same.
"""

REJECTION, BLOCK_RULE = "rejection", "block"
"""Names of the rules."""

Distribution = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""(logits, inv_t, lse, cut, tie_id)"""


def check(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    seeds: Tensor | None = None,
    root_positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int | None = None,
    rule: str = REJECTION,
    mass: Tensor | None = None,
) -> None:
    """Raises ValueError for arguments that rejection_verify cannot take; without randomness, for
    rejection_thresholds.
    """
    op = "rejection_verify" if max_depth is not None else "rejection_thresholds"
    if rule not in (REJECTION, BLOCK_RULE):
        raise ValueError(f"{op}: rule is {rule!r}; expected {REJECTION!r} or {BLOCK_RULE!r}")
    nodes = argument_checks.check_tensor(op, "tokens", tokens, torch.int64, "M").shape[0]
    argument_checks.check_offsets(op, offsets, nodes)
    batch = offsets.shape[0] - 1
    argument_checks.check_tensor(op, "proposal_kinds", proposal_kinds, torch.int8, nodes)
    argument_checks.check_tensor(op, "dist_index", dist_index, torch.int32, nodes)
    vocab = argument_checks.check_dist(op, "target", target, nodes)[0].shape[1]
    argument_checks.check_block_masses(op, mass, target)
    dists = 0
    if draft is not None:
        dists, width = argument_checks.check_dist(op, "draft", draft, "R")[0].shape
        if token_ids is not None:
            argument_checks.check_tensor(op, "token_ids", token_ids, torch.int64, width)
        elif width > vocab:
            raise ValueError(
                f"{op}: draft distributions have {width} columns, target distributions {vocab}; expected at most as "
                f"many; slice off "
                "padding or pass token_ids"
            )
    if max_depth is not None:
        argument_checks.check_tensor(op, "seeds", seeds, torch.int64, batch)
        argument_checks.check_tensor(op, "root_positions", root_positions, torch.int32, batch)
        if uniforms is not None:
            argument_checks.check_tensor(op, "uniforms", uniforms, torch.float32, nodes)
        if race is not None:
            if not isinstance(race, (tuple, list)) or len(race) != 2:
                raise ValueError(f"{op}: race is {type(race).__name__}; expected (block noise, token noise)")
            argument_checks.check_tensor(
                op, "race block noise", race[0], torch.float32, batch, (vocab + BLOCK - 1) // BLOCK
            )
            argument_checks.check_tensor(op, "race token noise", race[1], torch.float32, batch, vocab)
        argument_checks.check_max_depth(op, max_depth)
    if not argument_checks.can_read_values(tokens):
        return
    inner = _ChainNodes.of(offsets, nodes).place > 0
    argument_checks.check_values(
        op, "tokens", ~inner | ((tokens >= 0) & (tokens < vocab)), tokens, f"an id in [0, {vocab})"
    )
    from_dist = inner & (proposal_kinds != DETERMINISTIC)
    if draft is None:
        argument_checks.check_values(
            op,
            "proposal_kinds",
            ~from_dist,
            proposal_kinds,
            "0 (chosen) everywhere when there are no draft distributions",
        )
    else:
        named = ~from_dist | ((dist_index >= 0) & (dist_index < dists))
        argument_checks.check_values(op, "dist_index", named, dist_index, f"a draft distribution in [0, {dists})")
        if token_ids is not None:
            argument_checks.check_values(
                op, "token_ids", (token_ids >= 0) & (token_ids < vocab), token_ids, f"in [0, {vocab})"
            )
    longest = int((offsets[1:] - offsets[:-1]).max()) - 1 if batch else 0
    if max_depth is not None and longest > max_depth:
        raise ValueError(
            f"{op}: a row has {longest} draft tokens; expected at most max_depth = {max_depth}; drawn tokens must all "
            "be verified, so pass a larger max_depth"
        )


class _ChainNodes(NamedTuple):
    row: Tensor  # int64 [M], -1 for tail nodes
    place: Tensor  # int64 [M], within the row; 0 for roots and tail nodes
    has_child: Tensor  # bool [M]; from `_weighed`: whether the child is a proposal

    @classmethod
    def of(cls, offsets: Tensor, nodes: int) -> _ChainNodes:
        packed = torch.arange(nodes, device=offsets.device)
        bounds = offsets.long()
        row = torch.searchsorted(bounds, packed, right=True) - 1
        tail = packed >= bounds[-1]
        row = row.clamp(max=max(len(bounds) - 2, 0))
        has_child = ~tail & (packed + 1 < bounds[(row + 1).clamp(max=len(bounds) - 1)])
        return cls(torch.where(tail, -1, row), torch.where(tail, 0, packed - bounds[row]), has_child)


def _log_weight_at(dist: Distribution, rows: Tensor, columns: Tensor) -> Tensor:
    """Log weight of one column of each given distribution row, -inf where it has none."""
    logits, inv_t, lse, cut, tie_id = dist
    level = logits[rows, columns].to(inv_t.dtype)
    keep = (level > cut[rows]) | ((level == cut[rows]) & (columns <= tie_id[rows]))
    value = torch.where(inv_t[rows] == 0, 0.0, level * inv_t[rows] - lse[rows])
    return torch.where(keep, value, -torch.inf).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def _weighed(
    tokens: Tensor,
    chain: _ChainNodes,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
) -> tuple[_ChainNodes, Tensor]:
    """The chain of proposals, and log p(x) - log q(x) of every token: -inf if it must be refused, 0 without a test."""
    nodes = tokens.shape[0]
    inner = chain.place > 0
    column = torch.where(inner, tokens, 0)
    parent = (torch.arange(nodes, device=tokens.device) - 1).clamp(min=0)
    log_p = _log_weight_at(target, parent, column)
    log_q = torch.zeros_like(log_p)
    if draft is not None and draft[0].shape[0] > 0:
        from_dist = inner & (proposal_kinds != DETERMINISTIC)
        if token_ids is not None:
            same = token_ids[None, :] == column[:, None]
            known, column = same.any(1), same.int().argmax(1)
        else:
            known = column < draft[0].shape[1]
            column = torch.where(known, column, 0)
        q = _log_weight_at(draft, torch.where(from_dist, dist_index, 0).long(), column)
        q = torch.where(known, q, -torch.inf).to(torch.promote_types(log_p.dtype, q.dtype))
        log_q = torch.where(from_dist, q, log_q.to(q.dtype))
    # no weight in q: x was not drawn from this distribution, so it is no proposal and says nothing of what is left of p
    stray = log_q < LEAST_LOG_WEIGHT
    ratio = torch.where(stray, -torch.inf, log_p - log_q)
    proposed = torch.cat([~stray[1:], stray.new_zeros(min(nodes, 1))])
    return chain._replace(has_child=chain.has_child & proposed), torch.where(inner, ratio, 0.0)


def _reach(log_ratio: Tensor, chain: _ChainNodes) -> Tensor:
    """w of the block rule, float64 [M]: the chance that the path ends at this node or later, given its tokens."""
    reach = torch.ones(len(log_ratio), dtype=torch.float64, device=log_ratio.device)
    ratio = log_ratio.double().exp()
    for step in range(1, int(chain.place.max()) + 1 if len(reach) else 0):
        here = (chain.place == step).nonzero().squeeze(1)
        reach[here] = (reach[here - 1] * ratio[here]).clamp(max=1.0)
    return reach


def _residual(
    nodes: Tensor,
    tokens: Tensor,
    chain: _ChainNodes,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    reach: Tensor | None,
    fall_back: bool = True,
) -> Tensor:
    """Weights of the token that is drawn if the path ends at these nodes, p where none are left: float [N, V]."""
    p = dist_probs(*(part[nodes] for part in target))
    dtype = p.dtype if draft is None else torch.promote_types(p.dtype, draft[1].dtype)
    p = p.to(dtype)
    has_child = chain.has_child[nodes]
    child = torch.where(has_child, nodes + 1, 0)
    chosen = has_child & (proposal_kinds[child] == DETERMINISTIC)
    from_dist = has_child & (proposal_kinds[child] != DETERMINISTIC)
    rest = p.clone()
    if reach is not None:
        rest *= torch.where(has_child, reach[nodes], 1.0).to(dtype)[:, None]
    rest[chosen, tokens[child[chosen]]] = 0.0
    if bool(from_dist.any()):
        assert draft is not None
        q = dist_probs(*(part[dist_index[child[from_dist]].long()] for part in draft))
        spread = torch.zeros(q.shape[0], p.shape[1], dtype=dtype, device=p.device)
        if token_ids is None:
            spread[:, : q.shape[1]] = q
        else:
            spread[:, token_ids] = q.to(dtype)
        rest[from_dist] = (rest[from_dist] - spread).clamp(min=0.0)
    if not fall_back:
        return rest
    # nothing left: p <= q up to rounding, so a rejection here is itself rounding; p is the distribution to draw from
    empty = rest.sum(1, dtype=torch.float64) <= 0
    return torch.where(empty[:, None], p, rest)


def _thresholds(
    tokens: Tensor,
    chain: _ChainNodes,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    log_ratio: Tensor,
    rule: str,
) -> tuple[Tensor, Tensor | None]:
    """Threshold of every node's coin, 1 at roots and 0 at tail nodes, and the reach of the block rule."""
    parts = (tokens, chain, proposal_kinds, dist_index, target, draft, token_ids)
    if rule == REJECTION:
        return torch.where(chain.row < 0, 0.0, log_ratio.exp().clamp(max=1.0)), None
    reach = _reach(log_ratio, chain)
    nodes = torch.arange(len(tokens), device=tokens.device)
    left = _residual(nodes, *parts, reach, fall_back=False).sum(1, dtype=torch.float64)
    share = torch.minimum(left / (left + (1.0 - reach)), reach)
    ends = (reach >= 1) | (reach <= 0) | ~chain.has_child | target[2].isnan()
    share = torch.where(ends, reach, share)
    return torch.where(chain.row < 0, 0.0, share), reach


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
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
    rule: str = REJECTION,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling on a batch of chains: emitted tokens have exactly the target's distribution.

    Token rule: node i of a row (the child of node i - 1) is accepted iff ``u < p(x) / q(x)``, strictly, where p is the
    target distribution after node i - 1 and q the distribution the token was drawn from (q(x) = 1 if it was chosen).
    After the first rejection the next token is drawn from the positive part of p - q (p without x if it was chosen);
    after none it is drawn from the distribution after the last node.

    Block rule: let w = 1 at the root and w = min(1, w' p(x) / q(x)) at its descendants, w' being that of the node
    before. The path ends at the last node with ``u < h``, whatever the coins before it say: h = w at the last node of a
    row and at a node whose target distribution has no weight (lse = NaN), elsewhere h = S / (S + 1 - w) (1 if w = 1)
    with S the total of the positive part of w p - q, p the target distribution after the node and q the distribution
    its child was drawn from. The next token is drawn from that positive part. At least as many tokens are accepted as
    by the rejection rule; for chains of chosen tokens the number has the same distribution.

    A drawn token that has no weight under its distribution (log q < -87) was not drawn from it and is no proposal.
    Both rules refuse it, take the node before it for the last one of its row, and so subtract nothing from p if the
    path ends there.

    The draw is a two-level race (``random.draw_from_weights``); only one row per request is
    read for it.

    Args:
        tokens: int64 [M] packed nodes in target ids; the first node of a row is its root.
        offsets: int32 [B + 1].
        proposal_kinds: int8 [M], DETERMINISTIC or SAMPLED; ignored at roots.
        dist_index: int32 [M], row of the draft distributions that a drawn node came from; ignored elsewhere.
        target: (logits [M, V], inv_t [M], lse [M], cut [M], tie_id [M]); row i is the distribution of the token after
            node i.
        draft: (logits [R, Vd], inv_t [R], lse [R], cut [R], tie_id [R]) or None if every node is chosen.
        token_ids: int64 [Vd], distinct target ids of the draft's columns, or None: column v is id v (Vd <= V).
        seeds: int64 [B], request seeds.
        root_positions: int32 [B], absolute positions of the roots.
        uniforms: float32 [M] in (0, 1) instead of the keyed coins (those of roots are ignored).
        race: Gumbel noise (blocks [B, ceil(V / 1024)], tokens [B, V]), float32, instead of the keyed one.
        max_depth: capacity of a path, the root not counted.
        rule: "rejection" or "block".
        mass: block masses of the target distributions, from distribution_stats(..., masses=True), or None. They save
            passes over the rows and never change the answer, except that h of the block rule may differ by rounding.

    Returns:
        path: int32 [B, max_depth + 1], packed indices, root first, padded with -1.
        num_accepted: int32 [B], the root not counted.
        next_token: int64 [B]. A row without nodes has path -1, 0 and next_token -1; a row that stops at a
            distribution without any weight (lse = NaN, see distribution_stats) has next_token 0.

    Raises:
        ValueError: wrong shape, dtype, id or distribution row, or a row with more than max_depth draft tokens.

    Sources: Leviathan, Kalman, Matias (2023), algorithm 1; Chen et al. (2023), algorithm 2; Sun et al. (2025, arXiv
    2403.10444), Block verification accelerates speculative decoding, algorithm 2.
    """
    check(tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids, seeds, root_positions, uniforms, race,
          max_depth=max_depth, rule=rule, mass=mass)  # fmt: skip
    nodes, batch, device = tokens.shape[0], offsets.shape[0] - 1, tokens.device
    dists = (proposal_kinds, dist_index, target, draft, token_ids)
    chain, log_ratio = _weighed(tokens, _ChainNodes.of(offsets, nodes), *dists)
    threshold, reach = _thresholds(tokens, chain, *dists, log_ratio, rule)
    if uniforms is None and batch:
        of_row = chain.row.clamp(min=0)
        uniforms = uniform(words(seeds[of_row], root_positions[of_row], chain.place, ACCEPT, 0))
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
    real = (count > 0).nonzero().squeeze(1)
    if len(real):
        last = (start + accepted)[real]
        weights = _residual(last, tokens, chain, *dists, reach)
        noise = (race[0][real], race[1][real]) if race is not None else None
        next_token[real] = draw_from_weights(weights, seeds[real], root_positions[real], accepted[real], RECOVER, noise)
    return path.to(torch.int32), accepted.to(torch.int32), next_token


def weighed(path: Tensor, num_accepted: Tensor, offsets: Tensor, nodes: int, rule: str) -> Tensor:
    """bool [nodes]: the rows whose distributions a rule needs; whether a node's token is accepted is a side of a
    coin.
    """
    ends = on_paths(path.gather(1, num_accepted[:, None].long()), nodes)
    return ends | _ChainNodes.of(offsets, nodes).has_child if rule == BLOCK_RULE else ends


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
    """distribution_stats and rejection_verify in one: the rejection rule reads the logits of a path's nodes and of no
    others.

    Args: as in rejection_verify, but for the target's distributions:
        logits: [M, V]; row i is that of the token after node i.
        sampling: (temperature, top_k, top_p, min_p), each [M], as distribution_stats takes them.

    Returns:
        path, num_accepted, next_token: as rejection_verify.
        inv_t, lse, cut, tie_id, mass: as distribution_stats(..., masses=True) for the node at which each path ends,
        and by the block rule for all nodes with a child. The other rows get no distribution: inv_t, cut and tie_id 0,
        lse +inf, mass NaN. Nor need a node without a child, whose distribution is drawn from as it is; a broken one
        (lse NaN) is told in any case.

    Raises:
        ValueError: as distribution_stats and rejection_verify.
    """
    inv_t, lse, cut, tie_id, mass = stats = distribution_stats(logits, *sampling, masses=True)
    answer = rejection_verify(
        tokens, offsets, proposal_kinds, dist_index, (logits, inv_t, lse, cut, tie_id), draft, token_ids, seeds,
        root_positions,
        max_depth=max_depth, rule=rule, mass=mass,
    )  # fmt: skip
    return (*answer, *only(weighed(*answer[:2], offsets, len(tokens), rule), stats))


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
    """What rejection_verify would do, without its randomness: for exact checks of its distribution, not for a
    decoding step.

    Args: as in rejection_verify.

    Returns:
        accept: [M], threshold of each node's coin (1 at roots, 0 at tail nodes).
        residual: [M, V], unnormalised weights of the token drawn if the path ends at node i. Zero at tail nodes. Both
        float32, float64 if target or draft logits are.

    Raises:
        ValueError: as rejection_verify.
    """
    check(tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids, rule=rule)
    nodes = tokens.shape[0]
    dists = (proposal_kinds, dist_index, target, draft, token_ids)
    chain, log_ratio = _weighed(tokens, _ChainNodes.of(offsets, nodes), *dists)
    accept, reach = _thresholds(tokens, chain, *dists, log_ratio, rule)
    residual = _residual(torch.arange(nodes, device=tokens.device), tokens, chain, *dists, reach)
    residual[chain.row < 0] = 0.0
    return accept.to(residual.dtype), residual
