"""Plain PyTorch definition of replay_verify."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from ..law_stats.reference import check as check_logits
from ..law_stats.reference import law_stats, on_paths, only
from ..proposals import depths
from ..replay_sample.reference import replay_sample
from ..tree_verify.reference import check as check_tree
from ..tree_verify.reference import tree_verify


def check(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    scouts: Tensor | None,
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
    expect.tensor(op, "tokens", tokens, torch.int64, len(logits))
    check_tree(tokens, offsets, first_child, next_sibling, tokens, scouts, max_depth=max_depth)
    batch = offsets.shape[0] - 1
    expect.tensor(op, "seeds", seeds, torch.int64, batch)
    expect.tensor(op, "root_positions", root_positions, torch.int32, batch)


def replay_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    scouts: Tensor | None,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
) -> tuple[Tensor, ...]:
    """law_stats, replay_sample and tree_verify in one, for whoever needs no choice but those on the path.

    Each tree is walked from its root: the token that replay_sample gives at a node leads to the child that has it, or
    is the next token. Only the logits of the nodes on the path need to be read.

    Args:
        tokens, offsets, first_child, next_sibling, scouts: the trees, as tree_verify takes them.
        logits: [M, V]; row i is that of the token after node i.
        sampling: (temperature, top_k, top_p, min_p), each [M], as law_stats takes them.
        seeds: int64 [B], request seeds.
        root_positions: int32 [B], absolute positions of the roots; a node of depth d chooses with the noise of d + 1
            positions further.
        max_depth: capacity of a path, the root not counted.

    Returns:
        path, num_accepted, next_token: as tree_verify. At a law without weight the choice is 0.
        inv_t, lse, cut, tie_id, mass: as law_stats(..., masses=True) for the nodes of every path. The other rows are
        not read: inv_t, cut and tie_id 0, lse +inf, mass NaN.

    Raises:
        ValueError: as law_stats, replay_sample and tree_verify.
    """
    links = (tokens, offsets, first_child, next_sibling)
    check(*links, scouts, logits, sampling, seeds, root_positions, max_depth=max_depth)
    stats = law_stats(logits, *sampling, masses=True)
    inv_t, _, cut, tie_id, _ = stats
    choice = torch.zeros_like(tokens)
    if len(seeds):
        row = torch.searchsorted(offsets.long(), torch.arange(len(tokens), device=tokens.device), right=True) - 1
        row = row.clamp(max=len(seeds) - 1)
        depth = torch.tensor(depths(offsets, first_child, next_sibling), dtype=torch.int32, device=tokens.device)
        choice = replay_sample(logits, inv_t, cut, tie_id, seeds[row], root_positions[row] + depth + 1)
    walked = tree_verify(*links, choice, scouts, max_depth=max_depth)
    return (*walked, *only(on_paths(walked[0], len(tokens)), stats))
