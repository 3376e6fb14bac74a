"""Plain PyTorch definition of replay_sample.

Tests: tests/kernels/test_replay_sample.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...random import replay_noise


def check(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    seeds: Tensor,
    positions: Tensor,
    noise: Tensor | None = None,
) -> None:
    """Raises ValueError for arguments that replay_sample cannot take."""
    op = "replay_sample"
    rows, vocab = argument_checks.check_logits(op, "logits", logits, "R").shape
    dtype = argument_checks.statistics_dtype(logits)
    argument_checks.check_tensor(op, "inv_t", inv_t, dtype, rows)
    argument_checks.check_tensor(op, "cut", cut, dtype, rows)
    argument_checks.check_tensor(op, "tie_id", tie_id, torch.int32, rows)
    argument_checks.check_tensor(op, "seeds", seeds, torch.int64, rows)
    argument_checks.check_tensor(op, "positions", positions, torch.int32, rows)
    if noise is not None:
        argument_checks.check_tensor(op, "noise", noise, torch.float32, rows, vocab)


def replay_sample(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    seeds: Tensor,
    positions: Tensor,
    noise: Tensor | None = None,
) -> Tensor:
    """Samples the token of each row that the request's shared noise selects: argmax of ``l * inv_t + gumbel``.

    Shapes: R rows, V token ids.

    The noise depends only on (seed, absolute position, token id). Target and drafter that use it agree as often as
    their distributions allow within a factor, at least (1 - TV) / (1 + TV). The text of a seed is the same with and
    without speculation.

    Args:
        logits: float32, bfloat16, float16 or float64 [R, V], any row stride.
        inv_t: Inverse temperatures, [R], from distribution_stats, as the next two.
        cut: Smallest logits that are kept, [R].
        tie_id: Largest ids that are kept at `cut`, int32 [R].
        seeds: Request seed of each row, int64 [R].
        positions: Absolute position of the sampled token, int32 [R].
        noise: Gumbel noise in place of keyed noise, float32 [R, V], or None.

    Returns:
        Token ids, int64 [R]. Only tokens with weight occur. Ties go to the lower id. Greedy rows give tie_id. Rows
        without any weight (see distribution_stats) give 0.

    Raises:
        ValueError: If a shape or dtype is wrong.

    Source:
        Gumbel-max trick; coupling by shared noise, Daliri, Musco, Suresh (2024), theorem 3.
    """
    check(logits, inv_t, cut, tie_id, seeds, positions, noise)
    rows, vocab = logits.shape
    if rows == 0:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    level = logits.to(argument_checks.statistics_dtype(logits))
    ids = torch.arange(vocab, device=logits.device)
    keep = (level > cut[:, None]) | ((level == cut[:, None]) & (ids <= tie_id[:, None]))
    if noise is None:
        noise = replay_noise(seeds, positions, vocab)
    score = torch.where(keep, level * inv_t[:, None] + noise, -torch.inf)
    return torch.where(inv_t == 0, tie_id.long(), score.argmax(1))
