"""Verification of trees in SGLang's layout: the same number of nodes in every tree, and links between them.

Nothing is read from a GPU. Tests: tests/embedding/test_verify_links.py, tests/integrations/test_sglang.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.core.former_names import explain_arguments
from specdec_fast.core.proposal_kind import ProposalKind
from specdec_fast.core.sampling_rows import PerRow
from specdec_fast.embedding.chain_batch import check_logits, check_tensors
from specdec_fast.embedding.node_order import ancestors
from specdec_fast.embedding.tree_links import parents_from_links
from specdec_fast.embedding.verification import Keys, apply_rule, request_arguments
from specdec_fast.interfaces import Acceptance
from specdec_fast.rules import get_rule
from specdec_kernels import TreePlan


@explain_arguments(place="verify_links")
def verify_links(
    logits: Tensor,
    draft_tokens: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    draft_probs: Tensor | None = None,
    *,
    max_depth: int | None = None,
    rule: str = "replay",
    seeds: Keys = None,
    positions: Keys = None,
    temperature: PerRow | None = None,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
) -> Acceptance:
    """Verifies trees of D nodes each, which are linked as in SGLang. Parents precede children.

    Siblings are tested in the order of their links. Nodes that no link leads to are ignored.

    Args:
        logits: The target's logits after each node, any float dtype, [B * D, V] or [B, D, V].
        draft_tokens: Tokens of the nodes, the newest token of each request first, integers [B, D].
        next_token: First child of each node by its index in the tree, -1 for none, integers [B, D].
        next_sibling: Next sibling of each node, -1 for none, integers [B, D].
        draft_probs: What the token of each node but the root was sampled from, [B, D - 1, Vd], independently of its
            siblings. None if the tokens are deterministic.
        max_depth: Upper bound of the depth of a node. None: D - 1.
        rule: Any lossless rule: "replay", "recursive_rejection", "traversal", "greedy".
        seeds: Seed of each request, [B].
        positions: Absolute position of the root of each request, [B].
        temperature: One number or [B]. None: 1, or 0 under rule `greedy`.
        top_k: One number or [B].
        top_p: One number or [B].
        min_p: One number or [B].

    Returns:
        `path` (accepted nodes as `b * D + i`, root first and padded with -1, [B, max_depth + 1]), `num_accepted` and
        `next_token`.

    Raises:
        TypeError: If an argument is no tensor that must be one.
        ValueError: If a shape or value is wrong, or if links are not those of a tree. Values on a GPU are not read.
    """
    found = get_rule(rule)
    check_tensors(
        "verify_links",
        logits=logits,
        draft_tokens=draft_tokens,
        next_token=next_token,
        next_sibling=next_sibling,
        draft_probs=draft_probs,
    )
    rows, nodes = draft_tokens.shape if draft_tokens.dim() == 2 else (-1, -1)
    flat = logits.reshape(-1, logits.shape[-1])
    if rows < 0 or next_token.shape != draft_tokens.shape or flat.shape[0] != rows * nodes or nodes < 1:
        raise ValueError(
            f"verify_links: got logits {list(logits.shape)}, draft_tokens {list(draft_tokens.shape)} and next_token "
            f"{list(next_token.shape)}; expected [B * D, V] and twice [B, D], with the root of each tree in front"
        )
    check_logits(flat)
    device = flat.device
    draft, plan = _linked_draft(draft_tokens, next_token, next_sibling, nodes - 1 if max_depth is None else max_depth)
    if draft_probs is not None and found.uses_q and nodes > 1:
        draft.dists = _draft_distributions(draft_probs, rows, nodes, flat.shape[1])
        every = torch.arange(rows * nodes, device=device).view(rows, nodes)
        source = (every - every[:, :1] // nodes - 1).to(torch.int32)
        source[:, 0] = -1
        draft.dist_index = source.flatten()
        draft.proposal_kinds = (draft.dist_index >= 0).to(torch.int8) * int(ProposalKind.SAMPLED)
    keys, sampling = request_arguments(
        rule, rows, device, (seeds, positions), (temperature, top_k, top_p, min_p), draft.row_of
    )
    return apply_rule(found, draft, plan, flat, sampling, keys)


def _linked_draft(tokens: Tensor, next_token: Tensor, next_sibling: Tensor, max_depth: int) -> tuple[Draft, TreePlan]:
    """Returns a draft of deterministic tokens, and its links as a plan. Rules read no ancestors of it."""
    rows, nodes = tokens.shape
    parents = parents_from_links(next_token, next_sibling, unused=True)
    late = parents >= torch.arange(nodes, device=tokens.device)
    if late.is_cpu and bool(late.any()):
        row, node = late.nonzero()[0].tolist()
        raise ValueError(
            f"links: tree {row}, node {node}: got parent {int(parents[row, node])}; expected an earlier node; "
            "order the nodes by specdec_fast.embedding.parent_first"
        )
    draft = Draft.packed(
        range(rows), tokens.long().flatten(), parents.to(torch.int32).flatten(), (nodes,) * rows, max_depth
    )
    start = torch.arange(rows, device=tokens.device)[:, None] * nodes
    first, following = (
        torch.where(links >= 0, links + start, -1).to(torch.int32).flatten() for links in (next_token, next_sibling)
    )
    depth = (ancestors(parents).sum(-1) - 1).to(torch.int32).flatten()
    none = torch.zeros(rows * nodes, -(-nodes // 32), dtype=torch.int32, device=tokens.device)
    return draft, TreePlan(depth, draft.row_of.to(torch.int32), none, first, following)


def _draft_distributions(probs: Tensor, rows: int, nodes: int, vocab_size: int) -> TokenDistributions:
    """Returns the draft distributions of all nodes but the roots. Raises ValueError for a wrong shape or value."""
    if tuple(probs.shape[:-1]) != (rows, nodes - 1) or not 0 < probs.shape[-1] <= vocab_size:
        raise ValueError(
            f"draft_probs: got {list(probs.shape)}; expected [{rows}, {nodes - 1}, V] with V at most {vocab_size}: a "
            "distribution for every node but the root"
        )
    return TokenDistributions.from_probs(probs.reshape(-1, probs.shape[-1]))
