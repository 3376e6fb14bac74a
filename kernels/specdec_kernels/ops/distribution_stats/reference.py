"""Plain PyTorch definition of distribution_stats."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...random import BLOCK

SMALLEST_TEMPERATURE = 1e-6
"""Below it (and above 0) logits times 1 / T would leave float32."""
LEAST_LOG_WEIGHT = -87.0
"""Below it a token has no weight: float32 has no normal number for it."""
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
    """Statistics that turn a row of logits into its processed sampling distribution, without storing probabilities.

    The weight of token v is ``exp(l * inv_t - lse)`` if ``l > cut`` or (``l == cut`` and ``v <= tie_id``), else 0, with
    ``l = logits[r, v]``; the weights of a row sum to 1. Order of the filters: temperature, then top-k, then top-p on
    the renormalised top-k (a token stays iff the mass strictly before it, logits descending and ids ascending, is
    below top_p), then min-p (a token stays iff its probability is at least min_p times the largest). All of them keep
    a prefix of that order, so one cut describes them exactly; ties go to the lower id.

    Args:
        logits: [R, V] float32, bfloat16, float16 or float64. The row stride is free: pass ``logits[:, :V]`` of a padded
            vocabulary. -inf marks a forbidden token.
        temperature: float32 [R]; 0 is greedy, else >= 1e-6.
        top_k: int32 [R]; 0 is off. Values above V are off too.
        top_p: float32 [R] in (0, 1]; 1 is off.
        min_p: float32 [R] in [0, 1]; 0 is off.
        masses: also return the total weight of every race block (``random.BLOCK`` ids), which costs no further pass and
            spares whoever draws from the row one.
        pivots: int64 [P], P <= R, a token for each of the first rows, or a negative number: the drafted one, whose
            rank and mass above come out of the pass that finds the normaliser. Where they show that it is the last one
            kept (the likely one, drafted, of a peaked distribution under top-p), a backend may read the row no second
            time. They change no cut and no tie, and lse by a rounding at most; the reference and the C++ backend
            ignore them.

    Returns:
        (inv_t, lse, cut, tie_id), each [R]; the first three float32 (float64 for float64 logits), tie_id int32; then
        mass, if wanted.
        Temperature only: cut = -inf, tie_id = V - 1. Greedy: inv_t = 0, lse = 0, cut = largest logit, tie_id = its
        lowest id; ``inv_t == 0`` is the mark of a greedy row. A row with a NaN or +inf logit, or without a finite one,
        has lse = cut = NaN and tie_id = 0: no token has weight, and the caller reports the row.
        mass: [R, ceil(V / 1024)] of lse's dtype, equal to the sums of the weights up to rounding; NaN throughout for
        rows that are greedy, filtered (top-k, top-p, min-p), without a distribution or with a normaliser beyond 1e4,
        where rounding hides what the weights are.

    Raises:
        ValueError: wrong shape, dtype or parameter value.

    Sources: top-k Fan, Lewis, Dauphin (2018) section 5.1; top-p Holtzman et al. (2020) section 3.1; min-p Nguyen et al.
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
    """Weights of a distribution, the definition in the contract of distribution_stats: [R, V] float32 (float64 for
    float64 logits).

    Materialises the matrix: for references, tests and inspection, not for a decoding step.
    """
    level = logits.to(argument_checks.statistics_dtype(logits))
    ids = torch.arange(logits.shape[1], device=logits.device)
    keep = (level > cut[:, None]) | ((level == cut[:, None]) & (ids <= tie_id[:, None]))
    greedy = (inv_t == 0)[:, None]
    log_weight = torch.where(greedy, 0.0, level * inv_t[:, None] - lse[:, None])
    return torch.where(keep, log_weight.exp(), 0.0)


def only(rows: Tensor, stats: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What distribution_stats(..., masses=True) found, for some rows (bool [R]); the others get the marks of a row
    that nobody asked for: inv_t, cut and tie_id 0, lse +inf, mass NaN.
    """
    inv_t, lse, cut, tie_id, mass = stats
    unknown = torch.full_like(lse, torch.inf), torch.full_like(mass, torch.nan)
    return (
        torch.where(rows, inv_t, 0.0),
        torch.where(rows, lse, unknown[0]),
        torch.where(rows, cut, 0.0),
        torch.where(rows, tie_id, 0),
        torch.where(rows[:, None], mass, unknown[1]),
    )


def on_paths(path: Tensor, nodes: int) -> Tensor:
    """bool [nodes]: whether a node is on one of the paths (int32 [B, D + 1], -1 padded)."""
    seen = torch.zeros(nodes + 1, dtype=torch.bool, device=path.device)
    seen[path.long().flatten()] = True  # padding marks the last place, which is cut off
    return seen[:nodes]
