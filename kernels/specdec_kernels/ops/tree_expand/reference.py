"""Plain PyTorch definition of tree_expand."""

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
    offsets: Tensor,
    scores: Tensor,
    width: int,
    keep: int,
    sharpness: float,
    seeds: Tensor | None,
    positions: Tensor | None,
    op: str = "tree_expand",
) -> None:
    """Raises ValueError for arguments that tree_expand, or an operator made of it, cannot take."""
    nodes, vocab = argument_checks.check_logits(op, "logits", logits, "N").shape
    dtype = argument_checks.statistics_dtype(logits)
    argument_checks.check_tensor(op, "inv_t", inv_t, dtype, nodes)
    argument_checks.check_tensor(op, "cut", cut, dtype, nodes)
    argument_checks.check_tensor(op, "tie_id", tie_id, torch.int32, nodes)
    argument_checks.check_offsets(op, offsets, nodes)
    argument_checks.check_tensor(op, "scores", scores, dtype, nodes)
    if not 1 <= width <= vocab:
        raise ValueError(f"{op}: width is {width}; expected between 1 and the vocabulary of {vocab}")
    if keep < 1:
        raise ValueError(f"{op}: keep is {keep}; expected at least 1")
    if not 0 < sharpness < float("inf"):
        raise ValueError(
            f"{op}: sharpness is {sharpness}; expected a number above 0; 1 takes the distribution as it is"
        )
    if (seeds is None) != (positions is None):
        raise ValueError(f"{op}: got one of seeds and positions; expected both, or neither for growth without noise")
    if seeds is not None and positions is not None:
        argument_checks.check_tensor(op, "seeds", seeds, torch.int64, nodes)
        argument_checks.check_tensor(op, "positions", positions, torch.int32, nodes)


def tree_expand(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    offsets: Tensor,
    scores: Tensor,
    *,
    width: int,
    keep: int,
    sharpness: float = 1.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """One level of growth: the `width` best children of every node, and the `keep` best children of every tree.

    The value of token v at a node is ``z = l * inv_t``, plus the request's replay noise where it is wanted; tokens that
    the distribution does not keep have none. A child's score is its parent's plus ``s z`` minus the log of the sum of
    ``exp(s z)`` over all kept tokens, s the sharpness, and never above its parent's, whatever the roundings. At s = 1
    that is, without noise, the log-probability of the path; with noise it measures how far ahead the path is of its
    rivals under the very noise that the target will use (Gumbel top-k).

    Args:
        logits: [N, V] float32, bfloat16, float16 or float64, any row stride; the nodes to grow from.
        inv_t: [N], from distribution_stats, as the next two; the log-normaliser is computed here.
        cut: [N].
        tie_id: int32 [N].
        offsets: int32 [B + 1], the nodes of each of B trees.
        scores: [N] of inv_t's dtype, score of every node; -inf: it gets no children.
        width: children per node, at most V.
        keep: children per tree.
        sharpness: of scores, above 1 where first choices come true more often than their weights say.
        seeds: int64 [N], request seeds of the replay noise, or None.
        positions: int32 [N], absolute positions of the children; a negative position gets no replay noise.

    Returns:
        tokens: int64 [N, width], best first, the lower id first among equals, -1 where the distribution has no more
            tokens.
        scores: [N, width] of inv_t's dtype, -inf where there is no token.
        best: int32 [B, keep], indices into the flattened children, the best first, the earlier first among equals, -1
            padded.
        A greedy distribution (inv_t 0) has one child, tie_id, at its parent's score. A distribution without tokens
        (cut NaN, +inf or no finite logit) has none.

    Raises:
        ValueError: wrong shape, dtype or number.

    Sources: EAGLE-2 (Li et al., 2024) section 4.1; Gumbel top-k, Kool, van Hoof, Welling (2019) section 3.
    """
    check(logits, inv_t, cut, tie_id, offsets, scores, width, keep, sharpness, seeds, positions)
    nodes, vocab = logits.shape
    bounds = offsets.tolist()
    if nodes == 0:
        nothing = torch.full((len(bounds) - 1, keep), -1, dtype=torch.int32, device=logits.device)
        empty = torch.zeros(0, width, dtype=torch.int64, device=logits.device)
        return empty, scores.new_empty(0, width), nothing
    level = logits.to(argument_checks.statistics_dtype(logits))
    ids = torch.arange(vocab, device=logits.device)
    kept = (level > cut[:, None]) | ((level == cut[:, None]) & (ids <= tie_id[:, None]))
    z = level * inv_t[:, None]
    if seeds is not None and positions is not None:
        z = torch.where((positions >= 0)[:, None], z + replay_noise(seeds, positions.clamp(min=0), vocab), z)
    z = torch.where(kept, z, -torch.inf)
    greedy = inv_t == 0
    z = torch.where(greedy[:, None], torch.where(ids == tie_id[:, None], 0.0, -torch.inf).to(z.dtype), z)
    z = torch.where((torch.isnan(cut) | (scores == -torch.inf))[:, None], -torch.inf, z)
    norm = (z.double() * sharpness).logsumexp(1).to(z.dtype)
    ordered, tokens = z.sort(dim=1, descending=True, stable=True)
    ordered, tokens = ordered[:, :width], tokens[:, :width]
    there = (ordered > -torch.inf) & torch.isfinite(norm)[:, None]
    tokens = torch.where(there, tokens, -1)
    found = torch.where(there, scores[:, None] + (ordered * sharpness - norm[:, None]).clamp(max=0), -torch.inf)
    best = torch.full((len(bounds) - 1, keep), -1, dtype=torch.int32, device=logits.device)
    for tree, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        own = found[start:stop].flatten()
        order = own.sort(descending=True, stable=True).indices[:keep]
        order = order[own[order] > -torch.inf]
        best[tree, : order.shape[0]] = (order + start * width).to(torch.int32)
    return tokens, found, best
