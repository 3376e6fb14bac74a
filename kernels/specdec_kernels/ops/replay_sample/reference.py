"""Plain PyTorch definition of replay_sample."""

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
    """The token of each row's distribution that the request's shared noise selects: argmax of ``l * inv_t + gumbel``.

    The noise depends only on (seed, absolute position, token id). Target and drafter that use it agree as often as
    their distributions allow within a factor (at least (1 - TV) / (1 + TV)), and the text of a seed is the same with
    and without speculation.

    Args:
        logits: [R, V] float32, bfloat16, float16 or float64, any row stride.
        inv_t: [R], from distribution_stats, as the next two.
        cut: [R].
        tie_id: int32 [R].
        seeds: int64 [R], request seed of each row.
        positions: int32 [R], absolute position of the token being chosen.
        noise: float32 [R, V] Gumbel noise instead of the keyed one.

    Returns:
        int64 [R]. Only tokens with weight are chosen; ties go to the lower id; greedy rows give tie_id; rows without
        any weight (see distribution_stats) give 0.

    Raises:
        ValueError: wrong shape or dtype.

    Sources: Gumbel-max trick; coupling by shared noise, Daliri, Musco, Suresh (2024), theorem 3.
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
