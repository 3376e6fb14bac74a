"""Plain PyTorch definition of replay_verify.

Tests: tests/kernels/test_replay_verify.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .._proposals.checks import depths
from ..distribution_stats.reference import check as check_logits
from ..distribution_stats.reference import distribution_stats, keep_rows, on_paths
from ..exact_match_verify.reference import check as check_tree
from ..exact_match_verify.reference import exact_match_verify
from ..replay_sample.reference import replay_sample


def check(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    score_only: Tensor | None,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
) -> None:
    """Raises ValueError for arguments that replay_verify cannot take."""
    op = "replay_verify"
    check_logits(logits, *sampling)
    argument_checks.check_tensor(op, "tokens", tokens, torch.int64, len(logits))
    check_tree(tokens, offsets, first_child, next_sibling, tokens, score_only, max_depth=max_depth)
    batch = offsets.shape[0] - 1
    argument_checks.check_tensor(op, "seeds", seeds, torch.int64, batch)
    argument_checks.check_tensor(op, "root_positions", root_positions, torch.int32, batch)


def replay_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    score_only: Tensor | None,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
) -> tuple[Tensor, ...]:
    """Runs distribution_stats, replay_sample and exact_match_verify in one operator.

    Shapes: M packed nodes of B rows, V target ids, K = ceil(V / 1024) noise blocks.

    Each tree is walked from its root. The token that replay_sample gives at a node leads to the child with that token,
    or is the next token. Only the logits of the nodes on the path need to be read.

    Args:
        tokens: Packed nodes, int64 [M]; the first node of a row is its root.
        offsets: First node of each row, int32 [B + 1].
        first_child: First child of each node, int32 [M], from tree_plan.
        next_sibling: Next sibling of each node, int32 [M], from tree_plan.
        score_only: Nodes that are never accepted, bool [M], or None.
        logits: [M, V]; row i belongs to the token after node i.
        sampling: (temperature, top_k, top_p, min_p), each [M], as distribution_stats takes them.
        seeds: Request seeds, int64 [B].
        root_positions: Absolute positions of the roots, int32 [B]. A node of depth d chooses with the noise of d + 1
            positions further.
        max_depth: Capacity of a path, the root not counted.

    Returns:
        path: As exact_match_verify.
        num_accepted: As exact_match_verify.
        next_token: As exact_match_verify. At a distribution without weight the choice is 0.
        inv_t, lse, cut, tie_id, mass: As distribution_stats(..., masses=True) for the nodes of every path. Other rows
            are cleared: inv_t, cut and tie_id 0, lse +inf, mass NaN.

    Raises:
        ValueError: As distribution_stats, replay_sample and exact_match_verify.
    """
    links = (tokens, offsets, first_child, next_sibling)
    check(*links, score_only, logits, sampling, seeds, root_positions, max_depth=max_depth)
    stats = distribution_stats(logits, *sampling, masses=True)
    inv_t, _, cut, tie_id, _ = stats
    choice = torch.zeros_like(tokens)
    if len(seeds):
        row = torch.searchsorted(offsets.long(), torch.arange(len(tokens), device=tokens.device), right=True) - 1
        row = row.clamp(max=len(seeds) - 1)
        depth = torch.tensor(depths(offsets, first_child, next_sibling), dtype=torch.int32, device=tokens.device)
        choice = replay_sample(logits, inv_t, cut, tie_id, seeds[row], root_positions[row] + depth + 1)
    verified = exact_match_verify(*links, choice, score_only, max_depth=max_depth)
    return (*verified, *keep_rows(on_paths(verified[0], len(tokens)), stats))
