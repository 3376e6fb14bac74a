"""Plain PyTorch definition of draft_sample.

Tests: tests/kernels/test_draft_sample.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...random import DRAFT, sample_from_weights
from .._proposals.verify_arguments import DistributionBatch
from ..distribution_stats.reference import dist_probs


def check(
    dists: DistributionBatch, seeds: Tensor, root_positions: Tensor, index: Tensor, mass: Tensor | None = None
) -> None:
    """Raises ValueError for arguments that draft_sample cannot take."""
    op = "draft_sample"
    rows = argument_checks.check_dist(op, "dist", dists, "R")[0].shape[0]
    argument_checks.check_tensor(op, "seeds", seeds, torch.int64, rows)
    argument_checks.check_tensor(op, "root_positions", root_positions, torch.int32, rows)
    argument_checks.check_tensor(op, "index", index, torch.int32, rows)
    argument_checks.check_block_masses(op, mass, (dists.logits,))


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
    """Samples one token per row from its distribution, for drafters (``random.sample_from_weights``).

    Shapes: R rows, V token ids.

    Args:
        logits: float32, bfloat16, float16 or float64 [R, V], any row stride.
        inv_t: Inverse temperatures, [R], from distribution_stats, as the next three.
        lse: Normalisers, [R].
        cut: Smallest logits that are kept, [R].
        tie_id: Largest ids that are kept at `cut`, int32 [R].
        seeds: Request seed of each row, int64 [R].
        root_positions: Absolute position of the root of the step that will verify the token, int32 [R].
        index: Number of the draw within the request's step, int32 [R]. Use each (seed, root position, index) for one
            draw only: two draws of equal counters are the same draw.
        mass: Block masses from distribution_stats(..., masses=True), or None. They save a pass and never change the
            result.

    Returns:
        Columns of ``logits``, int64 [R]; map them if the draft vocabulary is smaller than the target's. Greedy rows
        give tie_id. Rows without any weight give 0.

    Raises:
        ValueError: If a shape or dtype is wrong.
    """
    dists = DistributionBatch(logits, inv_t, lse, cut, tie_id)
    check(dists, seeds, root_positions, index, mass)
    return sample_from_weights(dist_probs(*dists), seeds, root_positions, index, DRAFT)
