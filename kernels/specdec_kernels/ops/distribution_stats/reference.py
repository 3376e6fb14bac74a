"""Plain PyTorch definition of distribution_stats.

Tests: tests/kernels/test_distribution_stats.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...random import BLOCK

SMALLEST_TEMPERATURE = 1e-6
"""Below it (and above 0) logits times 1 / T would leave float32."""
FARTHEST = 1e4
"""Normalisers beyond it leave too few digits to the weights for masses to be of use."""


def check_pivots(pivots: Tensor | None, rows: int) -> None:
    """Raises ValueError for pivots that distribution_stats cannot take."""
    if (
        pivots is not None
        and argument_checks.check_tensor("distribution_stats", "pivots", pivots, torch.int64, "P").shape[0] > rows
    ):
        raise ValueError(
            f"distribution_stats: pivots has {pivots.shape[0]} tokens; expected at most one for each of {rows} rows"
        )


def check(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, pivots: Tensor | None = None
) -> None:
    """Raises ValueError for arguments that distribution_stats cannot take."""
    rows = argument_checks.check_logits("distribution_stats", "logits", logits, "R").shape[0]
    check_parameters("distribution_stats", temperature, top_k, top_p, min_p, rows)
    check_pivots(pivots, rows)


def check_parameters(op: str, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, rows: int) -> None:
    """Raises ValueError for sampling parameters of `rows` rows that do not fit."""
    argument_checks.check_tensor(op, "temperature", temperature, torch.float32, rows)
    argument_checks.check_tensor(op, "top_k", top_k, torch.int32, rows)
    argument_checks.check_tensor(op, "top_p", top_p, torch.float32, rows)
    argument_checks.check_tensor(op, "min_p", min_p, torch.float32, rows)
    if not argument_checks.can_read_values(temperature):
        return
    good = (temperature == 0) | ((temperature >= SMALLEST_TEMPERATURE) & torch.isfinite(temperature))
    argument_checks.check_values(
        op, "temperature", good, temperature, f"0 (greedy) or a number >= {SMALLEST_TEMPERATURE}"
    )
    argument_checks.check_values(op, "top_k", top_k >= 0, top_k, "a count >= 0; 0 turns top-k off")
    argument_checks.check_values(
        op, "top_p", (top_p > 0) & (top_p <= 1), top_p, "a number in (0, 1]; 1 turns top-p off"
    )
    argument_checks.check_values(
        op, "min_p", (min_p >= 0) & (min_p <= 1), min_p, "a number in [0, 1]; 0 turns min-p off"
    )


def distribution_stats(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    masses: bool = False,
    pivots: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Computes the statistics that turn rows of logits into sampling distributions, without storing probabilities.

    Shapes: R rows, V token ids, K = ceil(V / 1024) noise blocks.

    The weight of token v is ``exp(l * inv_t - lse)`` if ``l > cut`` or (``l == cut`` and ``v <= tie_id``), else 0, with
    ``l = logits[r, v]``. The weights of a row sum to 1. The filters apply in this order:

    1. temperature;
    2. top-k;
    3. top-p on the renormalised top-k: a token stays iff the mass strictly before it, logits descending and ids
       ascending, is below top_p;
    4. min-p: a token stays iff its probability is at least min_p times the largest.

    All of them keep a prefix of that order, so one cut describes them exactly. Ties go to the lower id.

    Args:
        logits: float32, bfloat16, float16 or float64 [R, V]. The row stride is free: pass ``logits[:, :V]`` of a padded
            vocabulary. -inf marks a forbidden token.
        temperature: float32 [R]; 0 is greedy, else at least 1e-6.
        top_k: int32 [R]; 0 is off, and so are values above V.
        top_p: float32 [R] in (0, 1]; 1 is off.
        min_p: float32 [R] in [0, 1]; 0 is off.
        masses: Also return the total weight of every noise block (``random.BLOCK`` ids). It costs no further pass and
            saves one for operators that sample from the row.
        pivots: Drafted token of each of the first P rows, int64 [P], P <= R, or a negative number. The pass that finds
            the normaliser also finds the pivot's place and the mass before it. If these show that it is the last token
            kept, a backend need not read the row twice. Pivots change no cut and no tie, and lse by a rounding at most.
            The reference and the C++ backend ignore them.

    Returns:
        inv_t: [R], 1 / temperature; 0 marks a greedy row. float32 like the next two, or float64 for float64 logits.
        lse: [R]. 0 for greedy rows. NaN, like cut, for a row with a NaN or +inf logit, or without a finite one: no
            token has weight, tie_id is 0, and the caller reports the row.
        cut: [R]. -inf without filters; the largest logit for greedy rows.
        tie_id: int32 [R]. V - 1 without filters; the lowest id of the largest logit for greedy rows.
        mass: Only with `masses`: [R, K] of lse's dtype, equal to the sums of the weights up to rounding. NaN throughout
            for rows that are greedy, filtered or without a distribution, or whose normaliser is beyond 1e4, where
            rounding hides the weights.

    Raises:
        ValueError: If a shape, dtype or parameter value is wrong.

    Source:
        Top-k Fan, Lewis, Dauphin (2018) section 5.1; top-p Holtzman et al. (2020) section 3.1; min-p Nguyen et al.
        (2024) section 3.
    """
    check(logits, temperature, top_k, top_p, min_p, pivots)
    rows, vocab = logits.shape
    dtype = argument_checks.statistics_dtype(logits)
    level = logits.to(dtype)
    greedy = temperature == 0
    inv_t = torch.where(greedy, 0.0, 1.0 / temperature.to(dtype))
    if rows == 0:
        none = [inv_t.new_empty(0, (vocab + BLOCK - 1) // BLOCK)] if masses else []
        return inv_t, inv_t.clone(), inv_t.clone(), top_k.clone(), *none

    ordered, ids = level.sort(dim=1, descending=True, stable=True)
    scaled = (ordered * inv_t[:, None]).double()
    share = (scaled - scaled[:, :1]).exp().nan_to_num(nan=0.0)
    use_k = (top_k > 0) & (top_k < vocab)
    limit = torch.where(use_k, top_k.long(), vocab)
    keep = torch.arange(vocab, device=logits.device) < limit[:, None]
    running = (share * keep).cumsum(1)
    before = torch.cat([torch.zeros_like(running[:, :1]), running[:, :-1]], dim=1)
    keep &= (before < top_p.double()[:, None] * running[:, -1:]) | (top_p == 1)[:, None]
    keep &= share >= min_p.double()[:, None]

    last = (keep.sum(1) - 1).clamp(min=0)[:, None]
    filtered = use_k | (top_p < 1) | (min_p > 0)
    cut = torch.where(filtered, ordered.gather(1, last).squeeze(1), -torch.inf)
    tie_id = torch.where(cut == -torch.inf, vocab - 1, ids.gather(1, last).squeeze(1))
    lse = scaled[:, 0] + (share * keep).sum(1).log()

    bad = torch.isnan(level).any(1) | (level == torch.inf).any(1) | ~torch.isfinite(level).any(1)
    bad |= ~greedy & ~torch.isfinite(scaled[:, 0])
    cut = torch.where(greedy, ordered[:, 0], cut)
    tie_id = torch.where(greedy, ids[:, 0], tie_id)
    lse = torch.where(greedy, 0.0, lse)
    nan = torch.nan
    stats = (
        inv_t,
        torch.where(bad, nan, lse).to(dtype),
        torch.where(bad, nan, cut),
        torch.where(bad, 0, tie_id).to(torch.int32),
    )
    if not masses:
        return stats
    blocks = dist_probs(logits, *stats).split(BLOCK, dim=1)
    mass = torch.stack([block.sum(1, dtype=torch.float64) for block in blocks], dim=1).to(dtype)
    return *stats, torch.where((greedy | filtered | ~(stats[1].abs() < FARTHEST))[:, None], nan, mass)


def dist_probs(logits: Tensor, inv_t: Tensor, lse: Tensor, cut: Tensor, tie_id: Tensor) -> Tensor:
    """Returns the weights of distributions, as distribution_stats defines them.

    It materialises the matrix: for references, tests and inspection, not for a decoding step.

    Args:
        logits: [R, V].
        inv_t: [R], from distribution_stats, as the next three.
        lse: [R].
        cut: [R].
        tie_id: int32 [R].

    Returns:
        Weights, float32 [R, V], or float64 for float64 logits.
    """
    level = logits.to(argument_checks.statistics_dtype(logits))
    ids = torch.arange(logits.shape[1], device=logits.device)
    keep = (level > cut[:, None]) | ((level == cut[:, None]) & (ids <= tie_id[:, None]))
    greedy = (inv_t == 0)[:, None]
    log_weight = torch.where(greedy, 0.0, level * inv_t[:, None] - lse[:, None])
    return torch.where(keep, log_weight.exp(), 0.0)


def keep_rows(rows: Tensor, stats: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Keeps the results of distribution_stats(..., masses=True) for some rows (bool [R]) and clears the others.

    Args:
        rows: Rows to keep, bool [R].
        stats: inv_t, lse, cut, tie_id and mass.

    Returns:
        The five tensors. Cleared rows have inv_t, cut and tie_id 0, lse +inf and mass NaN.
    """
    inv_t, lse, cut, tie_id, mass = stats
    no_lse, no_mass = torch.full_like(lse, torch.inf), torch.full_like(mass, torch.nan)
    return (
        torch.where(rows, inv_t, 0.0),
        torch.where(rows, lse, no_lse),
        torch.where(rows, cut, 0.0),
        torch.where(rows, tie_id, 0),
        torch.where(rows[:, None], mass, no_mass),
    )


def on_paths(path: Tensor, nodes: int) -> Tensor:
    """Returns whether each node is on one of the paths (int32 [B, D + 1], -1 padded), bool [nodes]."""
    seen = torch.zeros(nodes + 1, dtype=torch.bool, device=path.device)
    seen[path.long().flatten()] = True  # padding marks the last place, which is cut off
    return seen[:nodes]
