"""Verifies vLLM's packed chains with the project's operators.

vLLM lays out the logits of a step as rows of nodes: for each request its root, then its draft tokens. Row i is the
distribution of the token after node i. This is the layout of the operators, so no logits are moved.
Tests: tests/integrations/vllm/test_chain_verification.py, tests/integrations/vllm/test_lane.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import ChainLayout
from specdec_kernels import TreePlan, rejection_verify_logits, replay_verify, tree_plan

Distribution = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Sampling = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(slots=True)
class Chains:
    """The drafts of B requests, packed as M nodes.

    Attributes:
        tokens: Root and draft tokens, int64 [M]. The ids of roots do not count. A negative id ends its chain.
        offsets: First node of each request, int32 [B + 1].
        plan: Links of the nodes.
        max_depth: Most draft tokens of a request.
        sampled: Distributions of sampled draft tokens, R rows, or None if all tokens are deterministic. The last row is
            one without any weight (`empty_row`).
        dist_index: Row of `sampled` from which each node was sampled, int32 [M]; -1 for a draft token that has none and
            is no proposal. None if all tokens are deterministic.
    """

    tokens: Tensor
    offsets: Tensor
    plan: TreePlan
    max_depth: int
    sampled: Distribution | None = None
    dist_index: Tensor | None = None


def plan_of(layout: ChainLayout) -> TreePlan:
    """Returns the links of chains. Those of chains of ordinary length are remembered."""
    return layout.plan or tree_plan(layout.parents, layout.offsets)


def verify_chains(
    rule: str, chains: Chains, logits: Tensor, sampling: Sampling, seeds: Tensor, roots: Tensor
) -> tuple[Tensor, Tensor]:
    """Verifies the drafts of a step and samples the token after them.

    Args:
        rule: "replay", "rejection" or "block".
        chains: The drafts.
        logits: [M, V], any float dtype.
        sampling: (temperature, top_k, top_p, min_p) of each node, as `distribution_stats` takes them, [M].
        seeds: Seed of each request, int64 [B].
        roots: Absolute position of each root, int32 [B].

    Returns:
        Emitted tokens of each request, -1 padded, int32 [B, max_depth + 1], and the number of accepted draft tokens,
        int32 [B].
    """
    if rule == "replay":
        plan = chains.plan
        links = (chains.tokens, chains.offsets, plan.first_child, plan.next_sibling, None)
        found = replay_verify(*links, logits, sampling, seeds, roots, max_depth=chains.max_depth)
    else:
        proposals = _proposals(chains)
        found = rejection_verify_logits(
            proposals[0], chains.offsets, *proposals[1:3], logits, sampling, *proposals[3:], seeds, roots,
            max_depth=chains.max_depth, rule=rule,
        )  # fmt: skip
    path, num_accepted, next_token = found[:3]
    return emitted_tokens(chains.tokens, path, num_accepted, next_token), num_accepted


def _proposals(chains: Chains) -> tuple[Tensor, Tensor, Tensor, Distribution, Tensor | None]:
    """Tokens, kinds, distribution index, draft distributions and their token ids, for `rejection_verify_logits`.

    A draft token that is no proposal gets a distribution in which it has no weight: such a token is rejected, and the
    node before it counts as the last one of its chain. This needs no look at the tokens, which may be on a device.

    Returns:
        Arguments of the operator, in this order.
    """
    tokens = chains.tokens
    if chains.sampled is None or chains.dist_index is None:
        none = tokens < 0
        kinds, index = none.to(torch.int8), torch.zeros_like(tokens, dtype=torch.int32)
        one = tokens.new_ones(1, dtype=torch.float32)
        only = (one.view(1, 1), one, one, one - torch.inf, one.to(torch.int32))
        return tokens.masked_fill(none, 1), kinds, index, only, tokens.new_zeros(1)  # weight for id 0 alone
    kinds = torch.ones_like(tokens, dtype=torch.int8)
    none = (tokens < 0) | (chains.dist_index < 0)
    index = chains.dist_index.masked_fill(none, chains.sampled[0].shape[0] - 1)
    return tokens.clamp(min=0), kinds, index, chains.sampled, None


def empty_row(like: Distribution) -> Distribution:
    """Returns one distribution without any weight, of the width and types of others."""
    logits, inv_t, lse, cut, tie_id = (each[:1] for each in like)
    none = torch.full_like(tie_id, -1)
    return logits, torch.ones_like(inv_t), torch.zeros_like(lse), torch.full_like(cut, torch.inf), none


def emitted_tokens(tokens: Tensor, path: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    """Lays out what a step emits as vLLM does: accepted draft tokens, the next token, then -1.

    Args:
        tokens: Packed nodes, int64 [M].
        path: Accepted nodes, root first and -1 padded, int32 [B, D + 1].
        num_accepted: Accepted draft tokens, int32 [B].
        next_token: int64 [B].

    Returns:
        int32 [B, D + 1].
    """
    if path.shape[1] == 1:
        return next_token.to(torch.int32)[:, None]
    accepted = tokens[path.clamp(min=0)].masked_fill_(path < 0, -1)
    accepted[:, 0] = -1  # the root is no news
    accepted = accepted.roll(-1, 1)
    return accepted.scatter_(1, num_accepted[:, None].long(), next_token[:, None]).to(torch.int32)
