"""Thresholds and residuals of the rejection and block rules on chains, in plain PyTorch.

Tests: tests/kernels/test_rejection_verify.py, tests/kernels/test_rejection_distribution.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._proposals.checks import DETERMINISTIC
from .._proposals.verify_arguments import Distribution, DistributionBatch, DraftChains
from ..distribution_stats.reference import dist_probs

LEAST_LOG_WEIGHT = -87.0
"""Below it a token has no weight: float32 has no normal number for it."""


class ChainNodes(NamedTuple):
    """Place of every packed node.

    Attributes:
        row: int64 [M], -1 for tail nodes.
        place: int64 [M], place within the row; 0 for roots and tail nodes.
        has_child: bool [M]; from `log_ratios` on, whether the next node is a proposal.
    """

    row: Tensor
    place: Tensor
    has_child: Tensor

    @classmethod
    def of(cls, offsets: Tensor, nodes: int) -> ChainNodes:
        """Places of `nodes` packed nodes, from int32 [B + 1] offsets."""
        packed = torch.arange(nodes, device=offsets.device)
        bounds = offsets.long()
        row = torch.searchsorted(bounds, packed, right=True) - 1
        tail = packed >= bounds[-1]
        row = row.clamp(max=max(len(bounds) - 2, 0))
        has_child = ~tail & (packed + 1 < bounds[(row + 1).clamp(max=len(bounds) - 1)])
        return cls(torch.where(tail, -1, row), torch.where(tail, 0, packed - bounds[row]), has_child)


def _log_weight_at(dists: Distribution, rows: Tensor, columns: Tensor) -> Tensor:
    """Log weight of one column of each given row, -inf where it has none."""
    logits, inv_t, lse, cut, tie_id = dists
    level = logits[rows, columns].to(inv_t.dtype)
    keep = (level > cut[rows]) | ((level == cut[rows]) & (columns <= tie_id[rows]))
    value = torch.where(inv_t[rows] == 0, 0.0, level * inv_t[rows] - lse[rows])
    return torch.where(keep, value, -torch.inf).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def log_ratios(chains: DraftChains) -> tuple[ChainNodes, Tensor]:
    """Returns the nodes, and log p(x) - log q(x) of every token.

    The ratio is -inf if a token must be rejected, and 0 at roots and tail nodes.
    """
    tokens, nodes = chains.tokens, len(chains.tokens)
    places = ChainNodes.of(chains.offsets, nodes)
    inner = places.place > 0
    column = torch.where(inner, tokens, 0)
    parent = (torch.arange(nodes, device=tokens.device) - 1).clamp(min=0)
    log_p = _log_weight_at(chains.target, parent, column)
    log_q = torch.zeros_like(log_p)
    if chains.draft is not None and chains.draft[0].shape[0] > 0:
        sampled = inner & (chains.proposal_kinds != DETERMINISTIC)
        if chains.token_ids is not None:
            same = chains.token_ids[None, :] == column[:, None]
            has_column, column = same.any(1), same.int().argmax(1)
        else:
            has_column = column < chains.draft[0].shape[1]
            column = torch.where(has_column, column, 0)
        q = _log_weight_at(chains.draft, torch.where(sampled, chains.dist_index, 0).long(), column)
        q = torch.where(has_column, q, -torch.inf).to(torch.promote_types(log_p.dtype, q.dtype))
        log_q = torch.where(sampled, q, log_q.to(q.dtype))
    # A token without weight in q was not sampled from q. It is no proposal, and nothing is subtracted from p.
    no_proposal = log_q < LEAST_LOG_WEIGHT
    ratio = torch.where(no_proposal, -torch.inf, log_p - log_q)
    proposed = torch.cat([~no_proposal[1:], no_proposal.new_zeros(min(nodes, 1))])
    return places._replace(has_child=places.has_child & proposed), torch.where(inner, ratio, 0.0)


def block_reach(log_ratio: Tensor, places: ChainNodes) -> Tensor:
    """w of the block rule, float64 [M]: probability that the path ends at a node or later, given its tokens."""
    reach = torch.ones(len(log_ratio), dtype=torch.float64, device=log_ratio.device)
    ratio = log_ratio.double().exp()
    for step in range(1, int(places.place.max()) + 1 if len(reach) else 0):
        here = (places.place == step).nonzero().squeeze(1)
        reach[here] = (reach[here - 1] * ratio[here]).clamp(max=1.0)
    return reach


def residual_weights(
    nodes: Tensor, chains: DraftChains, places: ChainNodes, reach: Tensor | None, fall_back: bool = True
) -> Tensor:
    """Computes the weights of the next token if the path ends at these nodes.

    Args:
        nodes: Packed nodes, int64 [N].
        chains: Draft chains.
        places: Nodes of the chains, from `log_ratios`.
        reach: Reach of the block rule, or None.
        fall_back: Whether to return p if the residual is empty.

    Returns:
        Weights, float [N, V].
    """
    p = dist_probs(*(part[nodes] for part in chains.target))
    dtype = p.dtype if chains.draft is None else torch.promote_types(p.dtype, chains.draft[1].dtype)
    p = p.to(dtype)
    has_child = places.has_child[nodes]
    child = torch.where(has_child, nodes + 1, 0)
    deterministic = has_child & (chains.proposal_kinds[child] == DETERMINISTIC)
    sampled = has_child & (chains.proposal_kinds[child] != DETERMINISTIC)
    rest = p.clone()
    if reach is not None:
        rest *= torch.where(has_child, reach[nodes], 1.0).to(dtype)[:, None]
    rest[deterministic, chains.tokens[child[deterministic]]] = 0.0
    if bool(sampled.any()):
        assert chains.draft is not None
        q = dist_probs(*(part[chains.dist_index[child[sampled]].long()] for part in chains.draft))
        spread = torch.zeros(q.shape[0], p.shape[1], dtype=dtype, device=p.device)
        if chains.token_ids is None:
            spread[:, : q.shape[1]] = q
        else:
            spread[:, chains.token_ids] = q.to(dtype)
        rest[sampled] = (rest[sampled] - spread).clamp(min=0.0)
    if not fall_back:
        return rest
    # An empty residual: p <= q up to rounding, and a rejection is itself rounding. The token is sampled from p.
    empty = rest.sum(1, dtype=torch.float64) <= 0
    return torch.where(empty[:, None], p, rest)


def rejection_rule(log_ratio: Tensor, places: ChainNodes) -> Tensor:
    """Returns the threshold of every node's uniform by the rejection rule: 1 at roots, 0 at tail nodes."""
    return torch.where(places.row < 0, 0.0, log_ratio.exp().clamp(max=1.0))


def block_rule(chains: DraftChains, log_ratio: Tensor, places: ChainNodes) -> tuple[Tensor, Tensor]:
    """Returns the threshold of every node's uniform, and its reach, by the block rule."""
    reach = block_reach(log_ratio, places)
    nodes = torch.arange(len(chains.tokens), device=chains.tokens.device)
    left = residual_weights(nodes, chains, places, reach, fall_back=False).sum(1, dtype=torch.float64)
    share = torch.minimum(left / (left + (1.0 - reach)), reach)
    ends = (reach >= 1) | (reach <= 0) | ~places.has_child | DistributionBatch(*chains.target).lse.isnan()
    share = torch.where(ends, reach, share)
    return torch.where(places.row < 0, 0.0, share), reach
