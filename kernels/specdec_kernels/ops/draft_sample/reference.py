"""Plain PyTorch definition of draft_sample."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...random import DRAFT, draw_from_weights
from ..distribution_stats.reference import dist_probs


def check(
    logits: Tensor,
    inv_t: Tensor,
    lse: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    seeds: Tensor,
    root_positions: Tensor,
    index: Tensor,
    mass: Tensor | None = None,
) -> None:
    """Raises ValueError for arguments that draft_sample cannot take."""
    op = "draft_sample"
    argument_checks.check_dist(op, "dist", (logits, inv_t, lse, cut, tie_id), "R")
    rows = logits.shape[0]
    argument_checks.check_tensor(op, "seeds", seeds, torch.int64, rows)
    argument_checks.check_tensor(op, "root_positions", root_positions, torch.int32, rows)
    argument_checks.check_tensor(op, "index", index, torch.int32, rows)
    argument_checks.check_block_masses(op, mass, (logits,))


def draft_sample(
    logits: Tensor,
    inv_t: Tensor,
    lse: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    seeds: Tensor,
    root_positions: Tensor,
    index: Tensor,
    *,
    mass: Tensor | None = None,
) -> Tensor:
    """One fresh draw per row from its distribution, for drafters, by the two-level race of
    ``random.draw_from_weights``.

    Args:
        logits: [R, V] float32, bfloat16, float16 or float64, any row stride.
        inv_t: [R], from distribution_stats, as the next three.
        lse: [R].
        cut: [R].
        tie_id: int32 [R].
        seeds: int64 [R], request seed of each row.
        root_positions: int32 [R], absolute position of the root of the step that will verify the token.
        index: int32 [R], number of the draw within the request's step. Each (seed, root position, index) must be used
            for one draw only: two draws of equal counters are the same draw.
        mass: block masses from distribution_stats(..., masses=True) or None. They save a pass and never change the
            answer.

    Returns:
        int64 [R], ids of the columns of ``logits`` (map them yourself if the draft vocabulary is smaller than the
        target's). Greedy rows give tie_id; rows without any weight give 0.

    Raises:
        ValueError: wrong shape or dtype.
    """
    check(logits, inv_t, lse, cut, tie_id, seeds, root_positions, index, mass)
    weights = dist_probs(logits, inv_t, lse, cut, tie_id)
    return draw_from_weights(weights, seeds, root_positions, index, DRAFT)
