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
    """Raises ValueError for arguments that tree_expand, or an operator built on it, cannot take."""
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
    """Expands nodes by one level: the `width` best children of every node, and the `keep` best children of every tree.

    The value of token v at a node is ``z = l * inv_t``, plus the request's replay noise if `seeds` are given. Tokens
    outside the node's distribution have no value.

    The score of a child is ``parent score + s * z - log(sum of exp(s * z) over all kept tokens)``, where s is the
    sharpness. It never exceeds the parent's score, whatever the rounding. Without noise and with s = 1, the score is
    the log-probability of the path. With noise, it measures the lead of the path over its competitors under the noise
    that the target will use (Gumbel top-k).

    A greedy distribution (inv_t 0) has one child, tie_id, with its parent's score. A distribution without tokens (cut
    NaN or +inf, or no finite logit) has no child.

    Args:
        logits: Logits of the nodes to expand, float32, bfloat16, float16 or float64 [N, V], any row stride.
        inv_t: Inverse temperature from distribution_stats, [N]. The log-normaliser is computed here.
        cut: Smallest kept logit, from distribution_stats, [N].
        tie_id: Largest kept id among logits equal to `cut`, from distribution_stats, int32 [N].
        offsets: First node of each of B trees, int32 [B + 1].
        scores: Score of every node, [N], dtype of `inv_t`. A node with score -inf gets no children.
        width: Children per node, 1 to V.
        keep: Children per tree, at least 1.
        sharpness: Factor s of the score. Use more than 1 if first choices come true more often than their weights say.
        seeds: Request seeds of the replay noise, int64 [N], or None for no noise.
        positions: Absolute positions of the children, int32 [N]. A negative position gets no noise.

    Returns:
        tokens: Children of each node, int64 [N, width], best first, lower id first among equals; -1 for none.
        scores: Scores of the children, [N, width], dtype of `inv_t`; -inf for none.
        best: Indices of each tree's best children in the flattened children, int32 [B, keep]. The best comes first,
            and the earlier index among equals. Padded with -1.

    Raises:
        ValueError: If a shape, dtype or number is wrong.

    Source:
        EAGLE-2 (Li et al. 2024), section 4.1; Gumbel top-k: Kool, van Hoof and Welling 2019, section 3.
    """
    check(logits, inv_t, cut, tie_id, offsets, scores, width, keep, sharpness, seeds, positions)
    nodes, vocab = logits.shape
    bounds = offsets.tolist()
    if nodes == 0:
        no_best = torch.full((len(bounds) - 1, keep), -1, dtype=torch.int32, device=logits.device)
        empty = torch.zeros(0, width, dtype=torch.int64, device=logits.device)
        return empty, scores.new_empty(0, width), no_best
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
    exists = (ordered > -torch.inf) & torch.isfinite(norm)[:, None]
    tokens = torch.where(exists, tokens, -1)
    child_scores = torch.where(exists, scores[:, None] + (ordered * sharpness - norm[:, None]).clamp(max=0), -torch.inf)
    best = torch.full((len(bounds) - 1, keep), -1, dtype=torch.int32, device=logits.device)
    for tree, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        own = child_scores[start:stop].flatten()
        order = own.sort(descending=True, stable=True).indices[:keep]
        order = order[own[order] > -torch.inf]
        best[tree, : order.shape[0]] = (order + start * width).to(torch.int32)
    return tokens, child_scores, best
